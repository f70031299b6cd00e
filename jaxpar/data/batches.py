"""Batches: from a source to global arrays laid out on the mesh.

The one idea: a batch is a pure function of (seed, step). Every process computes the rows that its
own devices hold and no others, so the global batch is the same on any number of processes, and a
run that starts at step s sees what an unbroken run sees there.
"""

import math
import os
from collections.abc import Callable, Iterator

import numpy as np

from jaxpar.data.documents import HOLDOUT, Documents, check_vocab, split_documents
from jaxpar.data.packing import Batch, pack_rows, rows_per_epoch
from jaxpar.data.sources import load_documents

SPLITS = ("train", "heldout", "all")
_FOREVER = 2**62  # steps in a run that nobody limits


def host_batch(
    documents: Documents,
    step: int,
    seed: int,
    global_batch: int,
    seq_len: int,
    rows: slice | np.ndarray | None = None,
) -> Batch:
    """Returns the batch of a step as numpy arrays [B, T], or some of its rows.

    Step s is rows s * B to (s + 1) * B - 1 of the endless sequence of epochs (see `pack_rows`), so
    epochs follow each other with no gap and no repeat, also inside a batch. `rows` picks rows of
    the global batch; they are equal whether asked for alone or together.

    >>> from jaxpar.data import documents_from_arrays
    >>> documents = documents_from_arrays([[1, 2, 3, 4, 5, 6]])
    >>> whole = host_batch(documents, step=7, seed=0, global_batch=4, seq_len=2)
    >>> part = host_batch(documents, step=7, seed=0, global_batch=4, seq_len=2, rows=slice(2, 4))
    >>> whole["tokens"].shape, bool((whole["tokens"][2:] == part["tokens"]).all())
    ((4, 2), True)
    """
    numbers = step * global_batch + np.arange(global_batch)
    return pack_rows(
        documents, numbers if rows is None else numbers[rows], seq_len=seq_len, seed=seed
    )


def batches(
    source: str | os.PathLike | Documents,
    plan=None,
    *,
    global_batch: int,
    seq_len: int,
    start: int = 0,
    steps: int | None = None,
    seed: int = 0,
    tokenizer: str | os.PathLike = "bytes",
    dtype: str = "uint16",
    eos: int | None = None,
    holdout: float = HOLDOUT,
    split: str = "train",
    vocab_size: int | None = None,
    prefetch: int = 2,
) -> Iterator[dict]:
    """Iterates over the batches of steps start, start + 1, ...: dicts of global arrays [B, T].

    A batch has tokens, targets, segment_ids, positions (int32) and weights (float32); see
    `pack_rows`. It depends on (seed, step) alone: to resume, pass the next step as `start`.

    source: what `load_documents` reads (with `tokenizer`, `dtype`, `eos`), or Documents.
    plan: has `mesh` and `batch_sharding`, a NamedSharding for [B, T]; each process reads the rows
        of its own devices. None gives numpy arrays.
    steps: how many batches to give; None goes on for ever, epoch after epoch.
    split: "train" or "heldout" of `split_documents(documents, holdout)`, or "all" documents.
    vocab_size: the model's; a token id that it does not have is refused.
    prefetch: batches made ahead, by a thread; 0 makes each when it is asked for.

    Raises ValueError at once, before the first batch, for what `load_documents` refuses, sizes
    that do not divide among the devices, a negative start, an unknown split or an empty one.

    >>> batch = next(batches("builtin", global_batch=8, seq_len=128))
    >>> batch["tokens"].shape, batch["weights"].dtype
    ((8, 128), dtype('float32'))
    """
    if start < 0 or (steps is not None and steps < 0):
        raise ValueError(
            f"start={start}, steps={steps} is not a range of steps; both count from 0; use the "
            f"number of steps done as start, and None or the number of batches wanted as steps"
        )
    check_batch(plan, global_batch, seq_len)
    documents = _documents(source, tokenizer, dtype, eos, vocab_size, holdout, split)
    if not len(documents):
        raise ValueError(
            f"split {split!r} of {documents.source} is empty; a source is split by document and "
            f"{_why_empty(holdout)}; use a source with more documents, or split='all'"
        )

    def make(step: int, rows) -> Batch:
        return host_batch(documents, step, seed, global_batch, seq_len, rows)

    stop = _FOREVER if steps is None else start + steps
    return _iterate(make, range(start, stop), plan, (global_batch, seq_len), prefetch)


def heldout_batches(
    source: str | os.PathLike | Documents,
    plan=None,
    *,
    global_batch: int,
    seq_len: int,
    tokenizer: str | os.PathLike = "bytes",
    dtype: str = "uint16",
    eos: int | None = None,
    holdout: float = HOLDOUT,
    split: str = "heldout",
    vocab_size: int | None = None,
    max_rows: int | None = None,
    prefetch: int = 2,
) -> Iterator[dict]:
    """Iterates once over the held-out rows: every token with a predecessor is counted once.

    Rows come in their own order, unshuffled; the last batch is filled up with rows of weight 0, so
    that all batches have the same shape [B, T]. `max_rows` stops after that many rows. Gives no
    batch at all when nothing is held out (a source with one document, or holdout=0).
    For Documents that are held out already, pass split="all". Other arguments and errors are
    those of `batches`.

    >>> from jaxpar.data import documents_from_arrays
    >>> documents = documents_from_arrays([[1, 2, 3, 4, 5], [6, 7, 8, 9]])
    >>> passes = heldout_batches(documents, global_batch=2, seq_len=3, split="all")
    >>> [batch["weights"].sum(axis=1).tolist() for batch in passes]
    [[3.0, 2.0], [2.0, 0.0]]
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(
            f"max_rows={max_rows} evaluates nothing; it must be at least 1; use None for all rows"
        )
    check_batch(plan, global_batch, seq_len)
    documents = _documents(source, tokenizer, dtype, eos, vocab_size, holdout, split)
    count = rows_per_epoch(documents, seq_len)
    count = count if max_rows is None else min(count, max_rows)

    def make(step: int, rows) -> Batch:
        numbers = step * global_batch + np.arange(global_batch)
        numbers = np.where(numbers < count, numbers, -1)
        chosen = numbers if rows is None else numbers[rows]
        return pack_rows(documents, chosen, seq_len=seq_len, seed=None)

    steps = range(-(-count // global_batch))
    return _iterate(make, steps, plan, (global_batch, seq_len), prefetch)


def check_batch(plan, global_batch: int, seq_len: int) -> None:
    """Raises ValueError if a batch [B, T] does not divide among the plan's devices.

    B must be a multiple of the product of the batch's axes, T of the sequence's; which these are
    says `plan.batch_sharding.spec`.
    """
    axes = _split_axes(plan)
    for name, size, here in (
        ("global_batch", global_batch, axes[0]),
        ("seq_len", seq_len, axes[1]),
    ):
        if size < 1:
            raise ValueError(f"{name} {size} holds nothing; it must be at least 1; try 8")
        shards = math.prod(here.values())
        if size % shards == 0:
            continue
        used = {axis: count for axis, count in here.items() if count > 1}
        product = " x ".join(f"{axis} {count}" for axis, count in used.items())
        rule = f"{product} = {shards}" if len(used) > 1 else product
        low = size // shards * shards
        near = f"{low} or {low + shards}" if low else str(shards)
        advice = f"use {near}"
        if name == "global_batch" and size == 1:
            advice = "use context or tensor for one long sequence"
        raise ValueError(f"{name} {size} is not a multiple of {rule}; {advice}")


def _split_axes(plan) -> tuple[dict[str, int], dict[str, int]]:
    """The mesh axes, with sizes, that split dim 0 and dim 1 of a batch."""
    if plan is None:
        return {}, {}
    spec = (*plan.batch_sharding.spec, None, None)[:2]
    names = [() if part is None else (part,) if isinstance(part, str) else part for part in spec]
    return tuple({axis: plan.mesh.shape[axis] for axis in part} for part in names)


def _documents(source, tokenizer, dtype, eos, vocab_size, holdout, split) -> Documents:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; it is one of {', '.join(SPLITS)}")
    if isinstance(source, Documents):
        check_vocab(source, vocab_size)
    else:
        source = load_documents(source, tokenizer, dtype=dtype, eos=eos, vocab_size=vocab_size)
    train, heldout = split_documents(source, holdout)
    return {"train": train, "heldout": heldout, "all": source}[split]


def _why_empty(holdout: float) -> str:
    return "holdout is 0" if holdout == 0 else "one document alone is not split"


def _iterate(
    make: Callable, steps: range, plan, shape: tuple[int, int], prefetch: int
) -> Iterator[dict]:
    """Gives make(step, rows of this process) for each step, as global arrays."""
    rows = None if plan is None else local_rows(plan.batch_sharding, shape)
    for batch in _ahead(lambda step: make(step, rows), steps, prefetch):
        yield batch if plan is None else _global_arrays(batch, plan.batch_sharding, shape, rows)


def _ahead(make: Callable[[int], Batch], steps: range, prefetch: int) -> Iterator[Batch]:
    """map(make, steps), computed `prefetch` elements ahead by a grain thread."""
    if prefetch == 0:
        yield from map(make, steps)
        return
    import grain  # loads in about half a second, so only where it is used

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    dataset = grain.MapDataset.range(steps.start, steps.stop).map(make)
    yield from dataset.to_iter_dataset(options)


def local_rows(sharding, shape: tuple[int, int]) -> np.ndarray:
    """The rows of a batch [B, T] that this process' devices hold, sorted, each once."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    held = [np.arange(shape[0])[index[0]] for index in indices]
    return np.unique(np.concatenate(held))


def _global_arrays(batch: Batch, sharding, shape: tuple[int, int], rows: np.ndarray) -> dict:
    """Puts this process' rows on its devices; no communication."""
    import jax

    def place(values: np.ndarray):
        def shard(index):
            first, stop, _ = index[0].indices(shape[0])
            begin = np.searchsorted(rows, first)
            return values[begin : begin + stop - first, index[1]]

        return jax.make_array_from_callback(shape, sharding, shard)

    return {name: place(values) for name, values in batch.items()}
