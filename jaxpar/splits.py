"""How one parameter is stored on the mesh, and how it travels to where it is used.

A parameter is stored in canonical form (no padding), split over its own axes and over the ZeRO
axes. `fetch` brings a device what its layers compute with: a linear function made of all-gathers
and, for shapes that do not divide, an all-to-all or a slice. The transpose of `fetch` is how the
gradient travels back: `give_back`. So one function defines both ways, for every ZeRO stage.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar import dims as dim_rules
from jaxpar.layout import BATCH_AXES, ZERO_AXES, Layout
from jaxpar.nn.parallel import axis_index, axis_size, vary


@dataclasses.dataclass(frozen=True)
class Split:
    """How a parameter of `shape` is stored, and how it becomes what layers use.

    `axes[i]`: mesh axes that dimension i is stored split over, outermost first. `zero_dim`: the
    dimension ZeRO shards over `zero_axes`, None where the parameter stays whole. Dimensions count
    from the end, so they hold for one layer and for a stack. `uneven`: what is done about a dim
    that does not divide: ("pad", dim, over, other) or ("group", dim, over); `note` in words.
    """

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    dims: tuple[str | None, ...]
    axes: tuple[tuple[str, ...], ...]
    zero_axes: tuple[str, ...] = ()
    zero_dim: int | None = None
    uneven: tuple | None = None
    vary_axes: tuple[str, ...] = ()
    note: str = ""

    @property
    def spec(self) -> PartitionSpec:
        """The stored array's PartitionSpec."""
        return PartitionSpec(*(a if len(a) > 1 else a[0] if a else None for a in self.axes))

    def parts(self, layout: Layout) -> int:
        """Number of different pieces the stored array is cut into."""
        return math.prod(layout.size(a) for a in self.axes)


def padded_size(size: int, parts: int) -> int:
    """The next multiple of `parts`."""
    return -(-size // parts) * parts


def split_param(
    path: str, shape: Sequence[int], dtype, dims: Sequence[str | None], layout: Layout
) -> Split:
    """Decides how a parameter is stored and fetched under a layout.

    kv heads fewer than `tensor` are fetched in groups, a vocabulary that does not divide is
    padded while it travels, a parameter ZeRO cannot split stays whole. Any other dim that does
    not divide is a ValueError naming parameter, dim, size, axis and axis size.
    """
    shape, dims = tuple(shape), tuple(dims)
    axes = _own_axes(path, dims, layout)
    uneven, notes = None, []
    for i, dim in enumerate(dims):
        if shape[i] % layout.size(axes[i]):
            over = axes[i]
            uneven = _uneven(path, dim, i - len(dims), shape, dims, over, layout)
            axes[i] = ()
            if uneven[0] == "pad" and uneven[3] is not None:
                axes[uneven[3]] = over
            notes.append(_uneven_note(dim, shape[i], over, uneven, layout))
    zero_axes = layout.present(ZERO_AXES)
    zero_dim = _zero_dim(shape, dims, axes, layout) if layout.zero and zero_axes else None
    if zero_dim is not None:
        axes[zero_dim] = axes[zero_dim] + zero_axes
    elif layout.zero and zero_axes:
        words = " x ".join(f"{a}={layout.size((a,))}" for a in zero_axes)
        notes.append(f"whole on every device: no dim of {shape} divides by {words}")
    return Split(
        path,
        shape,
        dtype,
        dims,
        tuple(axes),
        zero_axes if zero_dim is not None else (),
        zero_dim,
        uneven,
        _vary_axes(dims, axes, uneven, layout),
        "; ".join(notes),
    )


def _own_axes(path, dims, layout: Layout) -> list[tuple[str, ...]]:
    """The axes that the rules give each dim; ValueError where they cannot hold."""
    try:
        axes = [layout.present(dim_rules.axes_of(d)) for d in dims]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    owner = {}
    for dim, axis in ((d, axis) for d, entry in zip(dims, axes, strict=True) for axis in entry):
        if axis in owner:
            raise ValueError(
                f"{path}: dims {owner[axis]!r} and {dim!r} of one array are both split over "
                f"{axis}; an axis can split one of them, so use None for the other"
            )
        owner[axis] = dim
    return axes


def _vary_axes(dims, axes, uneven, layout: Layout) -> tuple[str, ...]:
    """Axes over which devices hold the same numbers but use them on different data."""
    split = {a for entry in axes for a in entry}
    by_tensor = layout.sequence_parallel or "head_dim" in dims  # used on a share of the heads
    used = BATCH_AXES + ("context", "pipe") + (("tensor",) if by_tensor else ())
    if uneven is not None:
        used += tuple(uneven[2])
    return tuple(a for a in layout.present(dict.fromkeys(used)) if a not in split)


def _uneven(path, dim, index, shape, dims, over, layout):
    parts, size = layout.size(over), shape[index]
    words = " x ".join(f"{a}={layout.size((a,))}" for a in over)
    if dim == "kv_heads" and size < parts and parts % size == 0:
        return ("group", index, over)
    if dim == "vocab":
        free = [j - len(dims) for j, d in enumerate(dims) if d == "embed" and shape[j] % parts == 0]
        return ("pad", index, over, free[0] if free else None)
    fits = [n for n in range(1, size + 1) if size % n == 0]
    also = f" (or a multiple of {size})" if dim == "kv_heads" else ""
    raise ValueError(
        f"{path} {shape}: {dim}={size} does not split over {words} = {parts} parts; "
        f"{' x '.join(over)} must be one of {', '.join(map(str, fits))}{also}"
    )


def _uneven_note(dim, size, over, uneven, layout):
    parts = layout.size(over)
    if uneven[0] == "group":
        return f"{dim}={size} held by groups of {parts // size} of {parts} {'x'.join(over)} devices"
    how = "all-to-all" if uneven[3] is not None else "slice of a whole copy"
    return f"{dim} {size} % {parts}: padded to {padded_size(size, parts)} where used, by {how}"


def _zero_dim(shape, dims, axes, layout: Layout) -> int | None:
    """The dim ZeRO splits: the outermost that divides, so that what a gather joins is in order.

    A gather along an inner dim would leave the parameter transposed in memory.
    """
    parts = layout.size(layout.present(ZERO_AXES))
    for i in range(len(shape)):
        if dims[i] != "layers" and shape[i] // layout.size(axes[i]) % parts == 0:
            return i - len(shape)
    return None


def fetch(x: jax.Array, split: Split) -> jax.Array:
    """Stored piece -> what this device's layers use, in the dtype of `x`.

    All-gathers over the ZeRO axes; pads and exchanges over the axes of an uneven dim. Typed as
    different on every device that uses it on other data, so that a gradient with respect to the
    result is this device's own.
    """
    x = vary(x, split.vary_axes)
    if split.zero_dim is not None:
        x = lax.all_gather(x, split.zero_axes, axis=split.zero_dim % x.ndim, tiled=True)
    if split.uneven is None:
        return x
    kind, dim, over, *rest = split.uneven
    dim %= x.ndim
    parts = math.prod(axis_size(a) for a in over)
    if kind == "group":
        first = axis_index(over) * x.shape[dim] // parts
        return lax.dynamic_slice_in_dim(x, first, 1, axis=dim)
    padded = padded_size(x.shape[dim], parts)
    x = jnp.pad(x, [(0, padded - n if i == dim else 0) for i, n in enumerate(x.shape)])
    if rest[0] is None:
        return lax.dynamic_slice_in_dim(
            x, axis_index(over) * (padded // parts), padded // parts, dim
        )
    return lax.all_to_all(x, over, split_axis=dim, concat_axis=rest[0] % x.ndim, tiled=True)


def stored_shape(split: Split, layout: Layout) -> tuple[int, ...]:
    """Shape of the piece one device stores."""
    return tuple(n // layout.size(a) for n, a in zip(split.shape, split.axes, strict=True))


def used_shape(split: Split, layout: Layout) -> tuple[int, ...]:
    """Shape of what `fetch` makes of a stored piece: what one device's layers use."""
    shape = []
    for n, axes in zip(split.shape, split.axes, strict=True):
        shape.append(n // layout.size(a for a in axes if a not in split.zero_axes))
    if split.uneven is None:
        return tuple(shape)
    kind, dim, over, *other = split.uneven
    parts = layout.size(over)
    shape[dim] = 1 if kind == "group" else padded_size(split.shape[dim], parts) // parts
    if other and other[0] is not None:
        shape[other[0]] = split.shape[other[0]]
    return tuple(shape)


def give_back(gradient: jax.Array, split: Split, layout: Layout) -> jax.Array:
    """The transpose of `fetch`, in fp32: this device's gradient -> the stored piece's gradient.

    Reduce-scatters over the ZeRO axes, all-reduces over the axes that hold copies. A gradient
    without the leading layers dim is one layer's.
    """
    shape = stored_shape(split, layout)[len(split.shape) - gradient.ndim :]
    own = tuple(a for entry in split.axes for a in entry)
    _, back = jax.vjp(lambda x: fetch(x, split), vary(jnp.zeros(shape, jnp.float32), own))
    return back(gradient.astype(jnp.float32))[0]


def split_state(state, params: Sequence[Split], layout: Layout) -> list[Split]:
    """A split for every leaf of `state`, in leaf order.

    Leaves that are parameters, or shaped like the parameter whose path theirs ends with
    (moments, averages), are stored like it; leaves with one of its dims summed away (factored
    second moments) keep the other dims' axes; anything else is whole on every device.
    """
    by_path = {s.path: s for s in params}
    flat, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    result = []
    for keys, leaf in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        names = path.split(".")
        owners = (by_path.get(".".join(names[i:])) for i in range(len(names)))
        owner = next((o for o in owners if o is not None), None)
        result.append(_like(owner, path, value, layout))
    return result


def _like(owner: Split | None, path: str, value, layout: Layout) -> Split:
    shape = tuple(value.shape)
    if owner is not None and owner.shape == shape:
        return dataclasses.replace(owner, path=path, dtype=value.dtype)
    whole = Split(path, shape, value.dtype, (None,) * len(shape), ((),) * len(shape))
    if owner is None or len(shape) != len(owner.shape) - 1:
        return whole
    for gone in range(len(owner.shape)):
        rest = [i for i in range(len(owner.shape)) if i != gone]
        if shape == tuple(owner.shape[i] for i in rest):
            axes = tuple(owner.axes[i] for i in rest)
            return dataclasses.replace(
                whole,
                dims=tuple(owner.dims[i] for i in rest),
                axes=axes,
                note=f"one dim fewer than {owner.path}",
            )
    return whole
