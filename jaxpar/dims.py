"""The one table that says how arrays are split: from the names of their dims to mesh axes.

A parameter names its dims (`dims=("layers", "embed", "ffn")`); its split, its gradient's, its
optimizer state's and its checkpoint's all follow from `RULES`.
"""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, PartitionSpec

from jaxpar.layout import AXES, BATCH_AXES, nearest

RULES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "seq": ("context",),
    "layers": ("pipe",),
    "vocab": ("pipe", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "experts": ("expert",),
    "embed": (),
    "head_dim": (),
    "positions": (),
}


def axes_of(dim: str | None, rules: Mapping[str, Sequence[str]] = RULES) -> tuple[str, ...]:
    """The mesh axes a dim is split over; `None` is a dim that is never split.

    Raises ValueError for a dim without a rule or a rule to an axis that no mesh has.
    """
    if dim is None:
        return ()
    if dim not in rules:
        raise ValueError(f"there is no rule for a dim {dim!r}; {nearest(dim, rules)}")
    for axis in rules[dim]:
        if axis not in AXES:
            raise ValueError(
                f"the rule for dim {dim!r} names an axis {axis!r}; {nearest(axis, AXES)}"
            )
    return tuple(rules[dim])


def spec(
    dims: Sequence[str | None],
    mesh: Mesh,
    shape: Sequence[int] | None = None,
    rules: Mapping[str, Sequence[str]] = RULES,
) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions are called `dims`, on `mesh`.

    Axes that the mesh lacks or that have one device are left out. With `shape` a size that does
    not divide is a ValueError (JAX would replicate it without a word); so are an unknown dim and
    two dims on one axis.

    >>> import jax
    >>> spec(("embed", "ffn"), jax.make_mesh((1,), ("tensor",)))
    PartitionSpec(None, None)
    """
    if shape is not None and len(shape) != len(dims):
        raise ValueError(
            f"dims {tuple(dims)} name {len(dims)} dimensions, "
            f"the shape {tuple(shape)} has {len(shape)}"
        )
    entries, owner = [], {}
    for i, dim in enumerate(dims):
        axes = tuple(a for a in axes_of(dim, rules) if mesh.shape.get(a, 1) > 1)
        for axis in axes:
            if axis in owner:
                raise ValueError(
                    f"dims {owner[axis]!r} and {dim!r} of one array are both split "
                    f"over {axis}; an axis can split one of them"
                )
            owner[axis] = dim
        if shape is not None:
            _check_divides(dim, shape[i], axes, mesh)
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)


def _check_divides(dim, size, axes, mesh):
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    if size % parts:
        words = " x ".join(f"{a}={mesh.shape[a]}" for a in axes)
        raise ValueError(
            f"dim {dim!r} of size {size} does not split into {words} = {parts} equal "
            f"parts; use a size that is a multiple of {parts}"
        )
