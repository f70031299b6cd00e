"""Attention of a sequence that is split over a mesh axis; usable alone, with or without one.

The one idea: `context = ring x ulysses`. Neighbours exchange heads for the sequence, so that each
holds a longer piece of the row with fewer heads (arXiv 2309.14509); these pieces then see each
other around the ring (`ring`). Either part may be of size 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxpar import _jax_compat
from jaxpar.layout import nearest, ring_and_ulysses
from jaxpar.nn.blocks import Ring, check_even
from jaxpar.nn.blockwise_attention import check_heads
from jaxpar.nn.order import ORDERS, VARIANTS, Context, inverse, places
from jaxpar.nn.parallel import axis_exists, axis_index, axis_size, vary
from jaxpar.nn.ring import circulate
from jaxpar.nn.sight import Rule, Tokens

KERNELS = ("blockwise", "cudnn", "xla")


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    window: int | None = None,
    is_causal: bool = True,
    variant: str = "ring",
    ulysses: int | None = None,
    order: str | None = None,
    kernel: str | None = None,
    axis: str | None = None,
    mesh=None,
) -> Float[Array, "B T N H"]:
    """softmax(q . k / sqrt(H)) . v of whole rows, however the sequence is split.

    Three places to call it: with whole arrays (no axis `axis` there): one device's attention. In
    a `shard_map` of your own that is manual over `axis` (None: "context", where it is there): the
    arrays are this device's part of the sequence. With `mesh`, outside: global arrays, which it
    splits over `axis` by itself in `order`, padding the sequence where it does not divide; the
    result is in the row's own order. There every device of the other axes computes all rows and
    heads; to split those as well use a `shard_map`.

    N is a multiple of K: query head n reads key head n // (N / K). A query sees the keys of its
    document (`segment_ids`; negative: padding, which gives 0) that do not come later (`is_causal`)
    and are less than `window` places away. `positions` say what comes before what; places within
    each document do where there are `segment_ids`. Without positions tokens are in `order`:
    contiguous (default; with `mesh` zigzag) or zigzag, see `jaxpar.nn.order`; only then does cuDNN
    need no mask. `variant`: ring, ulysses,
    allgather, ring+ulysses, with `ulysses` devices that exchange heads. `kernel` computes the
    blocks: blockwise, cudnn (GPUs, bf16) or xla (stores the scores of a block); None: cudnn where
    it runs, else blockwise. Raises ValueError, before anything compiles, for heads that do not
    divide and names it does not know.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> attention(x, x, x, window=2).shape
    (1, 4, 2, 8)
    """
    _check(q, k, v, segment_ids, positions)
    for name, value, known in (
        ("variant", variant, VARIANTS), ("order", order or "zigzag", ORDERS[:2]),
        ("kernel", kernel or "xla", KERNELS),
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name}={value!r} is not a choice; {nearest(value, known)}")
    if order is not None and positions is not None:
        raise ValueError(
            f"order={order!r} and positions both say where tokens are; give one of them"
        )
    on_cpu = (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) == "cpu"
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    if kernel == "cudnn" and not half:
        raise ValueError(
            f"kernel='cudnn' takes bfloat16 or float16, found {q.dtype}; use blockwise"
        )
    kernel = kernel or ("cudnn" if half and not on_cpu else "blockwise")
    rule, more = Rule(is_causal, window), dict(one_at_a_time=on_cpu)
    if mesh is not None:
        axis = axis or "context"
        if axis not in mesh.shape:
            raise ValueError(f"the mesh has no axis {axis!r}; {nearest(axis, mesh.axis_names)}")
        context = make_context(mesh.shape[axis], variant, ulysses, order or "zigzag", axis, **more)
        return _on_mesh(mesh, context, kernel, rule, q, k, v, segment_ids, positions)
    if axis is not None and not axis_exists(axis):
        raise ValueError(
            f"there is no manual axis {axis!r} here; call attention inside a shard_map over it, or "
            "leave axis out for arrays that hold whole rows"
        )
    axis = axis or "context"
    order = order or "contiguous"
    context = make_context(axis_size(axis), variant, ulysses, order, axis, **more)
    return _in_place(context, kernel, rule, q, k, v, segment_ids, positions)


def make_context(
    size: int, variant: str, ulysses: int | None, order: str, axis: str = "context", **more
) -> Context:
    """How `size` devices run a variant. Raises ValueError for a `ulysses` that does not divide."""
    if variant == "ring+ulysses" and size > 1 and not ulysses:
        raise ValueError(
            f"attention='ring+ulysses' needs ulysses, how many of {axis}={size} exchange heads"
        )
    ring, ulysses = ring_and_ulysses(size, variant, ulysses or 0, axis)
    gathers = variant == "allgather"
    return Context(ring, ulysses, gathers, order, axis, **more)


def attend(
    context: Context,
    kernel: str,
    rule: Rule,
    q: Float[Array, "b t N H"],
    k: Float[Array, "b t K H"],
    v: Float[Array, "b t K H"],
    queries: Tokens,
    keys: Tokens,
    in_order: bool = True,
) -> Float[Array, "b t N H"]:
    """Attention inside the manual region; `queries` [b, t] are this device's tokens, `keys` [b, T]
    those of the whole row, the first device's first."""
    check_exchange(context, q.shape[2], k.shape[2])
    axes = {context.axis} if context.size > 1 else set()
    for x in jax.tree.leaves((q, k, v, queries, keys)):
        axes |= _jax_compat.varying_axes(x)
    q, k, v = (vary(x, sorted(axes)) for x in (q, k, v))
    ring = Ring(context, kernel, rule, in_order)
    check_even(ring, q.shape[1] * context.ulysses, queries)
    if context.ulysses == 1:
        return circulate(ring, q, k, v, queries, keys)
    # q[b, t, N, H] -> [b, t * u, N / u, H]: all-to-all of its bytes; k and v likewise, together
    kv = jnp.stack([k, v])
    kv = jnp.repeat(kv, max(context.ulysses // kv.shape[3], 1), axis=3)
    q, (k, v) = _exchange(context, q, 2, 1), _exchange(context, kv, 3, 2)
    queries = keys.part(ring.member() * q.shape[1], q.shape[1])
    out = circulate(ring, q, k, v, queries, keys)
    return _exchange(context, out, 1, 2)  # and back


def check_exchange(context: Context, heads: int, kv_heads: int) -> None:
    """Refuses heads of one device that cannot be divided among those that exchange them."""
    check_heads(heads, kv_heads)
    u, size = context.ulysses, context.size
    fits = lambda n: heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)  # noqa: E731
    if fits(u):
        return
    both = [n for n in range(2, size) if size % n == 0 and fits(n)]
    others = f"'ring+ulysses' with ulysses={' or '.join(map(str, both))}, or " if both else ""
    raise ValueError(
        f"{u} devices of {context.axis}={size} exchange heads, and each has {heads} heads and "
        f"{kv_heads} kv heads: {u} must divide the heads, and divide the kv heads or be a multiple "
        f"of them; use {others}'ring' or 'allgather'"
    )


def _exchange(context: Context, x, split: int, concat: int):
    u = context.ulysses
    groups = [list(range(i * u, (i + 1) * u)) for i in range(context.ring)]
    return lax.all_to_all(
        x, context.axis, split, concat, tiled=True,
        axis_index_groups=groups if context.ring > 1 else None,
    )  # fmt: skip


def _in_place(context, kernel, rule, q, k, v, segments, positions):
    """Here and now: with `context.size` 1 alone, else with the other devices of the axis."""
    length = q.shape[1] * context.size

    def gather(a):  # int32 [b, t] -> [b, T]: all-gather over the axis, 4 bytes a token
        return a if context.size == 1 else lax.all_gather(a, context.axis, axis=1, tiled=True)

    if positions is None:
        table = places(length, context if context.size > 1 else Context(order="contiguous"))
        mine, every = jnp.asarray(table)[axis_index((context.axis,))][None], table.reshape(1, -1)
    else:
        mine, every = positions, gather(positions)
    segments_of_keys = None if segments is None else gather(segments)
    queries, keys = Tokens(mine, segments), Tokens(jnp.asarray(every), segments_of_keys)
    return attend(context, kernel, rule, q, k, v, queries, keys, positions is None)


def _on_mesh(mesh, context, kernel, rule, q, k, v, segments, positions):
    """Global arrays: padded, put in order, split, computed, and put back."""
    length = q.shape[1]
    missing = -length % context.multiple
    if missing:
        if segments is None:
            segments = jnp.zeros(q.shape[:2], jnp.int32)
        pad = lambda a, value=0: jnp.pad(  # noqa: E731
            a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2), constant_values=value
        )
        q, k, v, segments = pad(q), pad(k), pad(v), pad(segments, -1)
        positions = None if positions is None else pad(positions)
    order = np.asarray(places(length + missing, context)).reshape(-1)
    arrays = jax.tree.map(lambda a: a[:, order], (q, k, v, segments, positions))
    split = PartitionSpec(None, context.axis)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)

    def run(q, k, v, segments, positions):
        return _in_place(context, kernel, rule, q, k, v, segments, positions)

    out = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split)(*arrays)
    return out[:, inverse(order)][:, :length]


def _check(q, k, v, segment_ids, positions) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; they must be of one type")
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape
    if not fits or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} do not fit: q is [B, T, N, H], k and v "
            "[B, T, K, H]"
        )
    check_heads(q.shape[2], k.shape[2])
    for name, array in (("segment_ids", segment_ids), ("positions", positions)):
        if array is not None and array.shape != q.shape[:2]:
            raise ValueError(f"{name} has shape {array.shape}; it must be {q.shape[:2]}, [B, T]")
