"""A batch: what it must be, and what one device gets of it.

The one idea: rows are split over the batch axes and each row over `context`. What depends on a
token's place in the row is computed on the whole row, before this device's tokens are taken.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.layout import BATCH_AXES, Layout
from jaxpar.nn.order import Context, document_places, places
from jaxpar.nn.parallel import axis_index


def check_batch(layout: Layout, batch: dict) -> None:
    """Refuses a batch that the layout cannot split, naming the nearest that it can."""
    for name in ("tokens", "targets", "weights"):
        if name not in batch:
            raise ValueError(
                f"the batch has no {name!r}; it needs tokens, targets and weights, "
                f"found {', '.join(batch)}"
            )
    shapes = {name: tuple(a.shape) for name, a in batch.items()}
    if len(set(shapes.values())) > 1 or len(shapes["tokens"]) != 2:
        raise ValueError(f"the arrays of a batch must all be [B, T], found {shapes}")
    rows, length = shapes["tokens"]
    check_rows(layout, rows)
    if length % layout.sequence_multiple:
        raise ValueError(_sequence_words(layout, length))


def _sequence_words(layout: Layout, length: int) -> str:
    multiple, tensor = layout.sequence_multiple, layout.tensor
    near = f"use {_near(length, multiple)}"
    split = f"tensor={tensor}, over which sequence parallelism splits it"
    if layout.context == 1:
        return f"seq_len {length} is not a multiple of {split}; {near}, or sequence_parallel=false"
    needs = f"context={layout.context}"
    if layout.context_order == "zigzag" and layout.attention != "ulysses":
        needs += " in zigzag order, two pieces a device"
    if layout.sequence_parallel and tensor > 1:
        needs += f", and {split}"
    return (
        f"seq_len {length} is not a multiple of {multiple}, which it must be for {needs}; {near}, "
        "or pad the batch with jaxpar.pad_batch"
    )


def pad_batch(batch: dict, layout: Layout) -> dict:
    """A batch [B, T] with tokens of weight 0 after the end, T a multiple of what `layout` needs.

    What is added counts nowhere: it comes after every token, in a document of its own (-1, where
    the batch has `segment_ids`). A batch that divides is returned as it is.

    >>> batch = dict.fromkeys(("tokens", "targets", "weights"), np.ones((1, 13)))
    >>> {name: a.shape for name, a in pad_batch(batch, Layout(context=4)).items()}["tokens"]
    (1, 16)
    """
    missing = -next(iter(batch.values())).shape[1] % layout.sequence_multiple
    if not missing:
        return batch
    fill = lambda name: -1 if name == "segment_ids" else 0  # noqa: E731
    return {
        name: (np if isinstance(a, np.ndarray) else jnp).pad(
            a, ((0, 0), (0, missing)), constant_values=fill(name)
        )
        for name, a in batch.items()
    }


def check_rows(layout: Layout, rows: int) -> None:
    """Refuses a global batch that batch axes and microbatches do not divide."""
    ways = {a: n for a, n in layout.axis_sizes.items() if a in BATCH_AXES and n > 1}
    product = layout.size(BATCH_AXES)
    if rows % product:
        words = " x ".join(f"{a} {n}" for a, n in ways.items())
        many = f" = {product}" if len(ways) > 1 else ""
        hint = (
            "use context or tensor for one long sequence"
            if rows < product
            else (f"use {_near(rows, product)}")
        )
        raise ValueError(f"global_batch {rows} is not a multiple of {words}{many}; {hint}")
    if rows % (product * layout.microbatches):
        local = rows // product
        fits = [m for m in range(1, local + 1) if local % m == 0]
        raise ValueError(
            f"global_batch {rows} gives {local} rows to each of {product} device groups, which "
            f"microbatches={layout.microbatches} does not divide; use microbatches="
            f"{min(fits, key=lambda m: abs(m - layout.microbatches))} or a global_batch of "
            f"{_near(rows, product * layout.microbatches)}"
        )


def _near(n: int, step: int) -> str:
    low, high = n // step * step, -(-n // step) * step
    return f"{low} or {high}" if low else str(high)


# ---- inside the manual region


def own_tokens(batch: dict, context: Context) -> dict:
    """This device's tokens of a batch whose rows come in pieces [b, T / context], in the order of
    `context`.

    Adds `positions` where they are missing, and for masks and dropout `places` [b, t] (in the row),
    `key_places` and `key_segments` [b, T] (of all devices' tokens, the first device's first).
    Gathers the arrays of the batch over the axis: 4 bytes a token each, once a step; in contiguous
    order the segments alone.
    """
    if context.size == 1:
        return batch
    rows, length = batch["tokens"].shape[0], batch["tokens"].shape[1] * context.size
    # [b, t] -> [b, T]: all-gather over the axis, 4 bytes a token
    gather = lambda a: lax.all_gather(a, context.axis, axis=1, tiled=True)  # noqa: E731
    segments = gather(batch["segment_ids"]) if "segment_ids" in batch else None
    if context.order == "document" and segments is not None:
        order = document_places(segments, context)
    else:
        order = jnp.asarray(places(length, context).reshape(1, -1))
        order = jnp.broadcast_to(order, (rows, length))
    mine = order.reshape(rows, context.size, -1)[:, axis_index((context.axis,))]
    if context.order != "contiguous":
        whole = {n: segments if n == "segment_ids" else gather(a) for n, a in batch.items()}
        batch = {n: jnp.take_along_axis(a, mine, axis=1) for n, a in whole.items()}
    added = {"places": mine, "key_places": order}
    if segments is not None:
        added["key_segments"] = jnp.take_along_axis(segments, order, axis=1)
    return {"positions": mine, **batch, **added}
