"""ZeRO and tensor shardings for your own arrays: any pytree, your own jitted loop, no jaxpar model.

The one idea: ZeRO (arXiv 1910.02054) is where arrays live. Give `jax.jit` the shardings of your
optimizer state (ZeRO 1) or of parameters and optimizer state (ZeRO 3), and XLA's partitioner adds
the communication. `specs`, such as those of `jaxpar.dims.spec`, come first; ZeRO splits further.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.layout import nearest


def zero_shardings(tree, mesh: Mesh, *, axes: Sequence[str] = ("data",), specs: Any = None):
    """A NamedSharding for every leaf of `tree`, split over `axes` on its largest dim that divides.

    tree: arrays or shapes: parameters, gradients or the state of any optax optimizer.
    specs: PartitionSpecs the leaves have already, as a tree like `tree` or a prefix of it; None is
        no split. Dims that they leave whole are preferred; leaves that they split over one of
        `axes` stay as they are.

    Scalars and leaves with no dim that divides stay whole on every device; `whole_leaves` lists
    them. Raises ValueError for an axis that the mesh lacks, for specs that do not fit `tree`, and
    for a dim that a spec does not divide.

    >>> import jax.numpy as jnp
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> tuple(zero_shardings({"w": jnp.zeros((4, 8))}, mesh)["w"].spec)
    (None, 'data')
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    _check_axes(axes, mesh, "axes")
    paths, leaves, structure = _flatten(tree)
    specs = _broadcast(PartitionSpec() if specs is None else specs, tree, "specs")
    found = []
    for path, leaf, spec in zip(paths, leaves, specs, strict=True):
        spec = PartitionSpec() if spec is None else spec
        shape = np.shape(leaf)
        entries = _entries(path, shape, spec, mesh)
        found.append(NamedSharding(mesh, _split(shape, entries, axes, mesh)))
    return structure.unflatten(found)


def whole_leaves(tree, shardings, axes: Sequence[str] = ("data",)) -> list[str]:
    """Paths of the leaves that `shardings` does not split over any of `axes`.

    >>> import jax.numpy as jnp
    >>> tree = {"scale": jnp.zeros(()), "w": jnp.zeros((4, 8))}
    >>> whole_leaves(tree, zero_shardings(tree, jax.make_mesh((1,), ("data",))))
    ['scale']
    """
    axes = {axes} if isinstance(axes, str) else set(axes)
    paths, _, _ = _flatten(tree)
    return [
        path
        for path, sharding in zip(paths, _broadcast(shardings, tree, "shardings"), strict=True)
        if not axes & {a for entry in sharding.spec for a in _axes_of(entry)}
    ]


def shard(tree, shardings):
    """Puts every leaf of `tree` where `shardings` says: a tree like it, or a prefix of it.

    Raises ValueError for a dim that its mesh axes do not divide, naming leaf, dim, size and axes,
    and for two leaves that are the very same array: a jitted step that donates both would fail.

    >>> import jax.numpy as jnp
    >>> tree = {"w": jnp.zeros((4, 8))}
    >>> placed = shard(tree, zero_shardings(tree, jax.make_mesh((1,), ("data",))))
    >>> tuple(placed["w"].sharding.spec)
    (None, 'data')
    """
    paths, leaves, structure = _flatten(tree)
    places = _broadcast(shardings, tree, "shardings")
    owner: dict[int, str] = {}
    for path, leaf, place in zip(paths, leaves, places, strict=True):
        if id(leaf) in owner:
            raise ValueError(
                f"{owner[id(leaf)]} and {path} are the very same array, which no step can donate "
                f"twice; keep it in one place and use it from there, or copy one with jnp.copy"
            )
        if hasattr(leaf, "dtype"):
            owner[id(leaf)] = path
        if isinstance(place, NamedSharding):
            _entries(path, np.shape(leaf), place.spec, place.mesh)
    return structure.unflatten(jax.device_put(leaves, list(places)))


def _flatten(tree):
    """(paths, leaves, structure); numbers are kept, anything without a shape is refused."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [
        jax.tree_util.keystr(keys, simple=True, separator=".") or "the tree" for keys, _ in flat
    ]
    for path, (_, leaf) in zip(paths, flat, strict=True):
        if not hasattr(leaf, "shape") and not isinstance(leaf, numbers.Number):
            kind = "function" if callable(leaf) else type(leaf).__name__
            raise ValueError(
                f"{path} is a {kind}, not an array; leave it out of the tree, such as "
                "with equinox.partition(model, equinox.is_array)"
            )
    return paths, [leaf for _, leaf in flat], structure


def _broadcast(prefix, tree, what: str) -> list:
    """One element of `prefix` for every leaf of `tree`."""
    is_leaf = lambda v: v is None or isinstance(v, (PartitionSpec, jax.sharding.Sharding))  # noqa: E731
    result: list = []
    try:
        jax.tree.map(
            lambda value, part: result.extend([value] * len(jax.tree.leaves(part))),
            prefix,
            tree,
            is_leaf=is_leaf,
        )
        return result
    except ValueError as error:
        raise ValueError(
            f"{what} does not have the structure of the tree, nor is it a prefix of it: {error}"
        ) from None


def _entries(path: str, shape, spec: PartitionSpec, mesh: Mesh) -> list[tuple[str, ...]]:
    """The mesh axes of each dim; ValueError where the spec does not fit mesh or shape."""
    if len(spec) > len(shape):
        raise ValueError(
            f"{path} has shape {tuple(shape)}, and {spec} splits {len(spec)} dims; "
            f"use at most {len(shape)}"
        )
    entries = [_axes_of(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    for dim, (size, names) in enumerate(zip(shape, entries, strict=True)):
        _check_axes(names, mesh, f"{spec} of {path}")
        parts = math.prod(mesh.shape[a] for a in names)
        if size % parts:
            words = " x ".join(f"{a}={mesh.shape[a]}" for a in names)
            total = f" = {parts}" if len(names) > 1 else ""
            raise ValueError(
                f"{path} {tuple(shape)}: dim {dim} of size {size} does not split over "
                f"{words}{total}; use a size that is a multiple of {parts}, or leave "
                "that dim whole"
            )
    return entries


def _split(shape, entries: list[tuple[str, ...]], axes: tuple[str, ...], mesh: Mesh):
    """The spec with `axes` added to the largest dim that divides, dims without a split first."""
    parts = math.prod(mesh.shape[a] for a in axes)
    local = [n // math.prod(mesh.shape[a] for a in e) for n, e in zip(shape, entries, strict=True)]
    fits = [i for i, n in enumerate(local) if n and n % parts == 0]
    if fits and not set(axes) & {a for e in entries for a in e}:
        best = max(
            fits, key=lambda i: (math.prod(mesh.shape[a] for a in entries[i]) == 1, local[i])
        )
        entries = [e + axes if i == best else e for i, e in enumerate(entries)]
    return PartitionSpec(*(e if len(e) > 1 else e[0] if e else None for e in entries))


def _axes_of(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _check_axes(axes, mesh: Mesh, what: str) -> None:
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"{what} names an axis {axis!r} that the mesh lacks; {nearest(axis, mesh.shape)}"
            )
