"""Which devices a collective joins, and along which mesh axes.

The one idea: a device's number is its place in the mesh, counted with the innermost axis fastest,
so the groups of a set of axes are known; a collective belongs to the axes whose groups are exactly
its own. XLA writes groups in four forms (lists, iota, mesh, and nothing at all for "everyone"),
which `parse_groups` brings to one.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LIST = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"^@?mesh[\[<](?P<axes>.*?)[\]>]"
    r"(?:,?\s*(?:device_ids=)?\((?:devices=)?(?P<ids>.*?)\))?\s*\{(?P<over>[^{}]*)\}$"
)
_MESH_IDS = re.compile(r"^(?:\[[\d,]+\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\)?)?$")
_SUBAXIS = re.compile(r"^(.*?)(?::\((\d+)\)(\d+))?$")


@lru_cache(maxsize=4096)
def parse_groups(text: str, num_devices: int) -> Groups:
    """Read `replica_groups` (or `source_target_pairs`) as tuples of device numbers.

    Args:
      text: the attribute's value, in any of XLA's forms.
      num_devices: the devices of the program; an empty list means one group of all of them.

    Raises ValueError for a form that is none of these.

    >>> parse_groups("{{0,1},{2,3}}", 4)
    ((0, 1), (2, 3))
    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['data'=2,'tensor'=2] {'data'}", 4)
    ((0, 2), (1, 3))
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return (tuple(range(num_devices)),)
    if text.startswith("{{"):
        return tuple(_numbers(group) for group in _LIST.findall(text[1:-1]))
    if found := _IOTA.match(text):
        shape, dims = _numbers(found[1]), _numbers(found[2])
        if np.prod(shape) == np.prod(dims):
            return _rows(_iota(dims, found[3]).reshape(shape[0], -1))
    if (found := _MESH.match(text)) and (groups := _mesh_groups(found)) is not None:
        return groups
    raise ValueError(
        f"replica_groups={text[:120]!r} has no known form; known are {{{{0,1}},{{2,3}}}}, "
        "[2,2]<=[4], [2,2]<=[2,2]T(1,0), mesh['a'=2,'b'=2] {'a'} and {}; compile with a JAX "
        "version that jaxpar supports"
    )


def axes_of_groups(groups: Groups, mesh_axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes, outermost first, whose groups these are; None when there are none.

    Groups of one device each give (), an operation without communication. Where each group of one
    axis is cut into parts, in the same way everywhere, it is that axis.

    >>> axes_of_groups(((0, 2), (1, 3)), {"data": 2, "tensor": 2})
    ('data',)
    >>> axes_of_groups(((0, 1), (2, 3)), {"context": 4})
    ('context',)
    """
    sizes = tuple(mesh_axes.values())
    members = [device for group in groups for device in group]
    if sorted(members) != list(range(int(np.prod(sizes)))):
        return None
    axes = _differing(next(g for g in groups if 0 in g), sizes)
    over = [i for i in range(len(sizes)) if i not in axes]
    size = int(np.prod([sizes[i] for i in axes], initial=1))
    expected = np.arange(len(members)).reshape(sizes).transpose(*over, *axes).reshape(-1, size)
    if {frozenset(group) for group in groups} != {frozenset(row) for row in _rows(expected)}:
        if len(axes) != 1 or not _same_parts(groups, sizes, axes[0]):
            return None
    return tuple(list(mesh_axes)[i] for i in axes)


def _same_parts(groups: Groups, sizes: tuple[int, ...], axis: int) -> bool:
    """Whether every line along `axis` is cut into the same parts, each of them a group."""
    lines: dict[tuple, set] = {}
    for group in groups:
        places = np.array(np.unravel_index(list(group), sizes))
        others = np.delete(places, axis, axis=0)
        if (others != others[:, :1]).any():
            return False
        lines.setdefault(tuple(others[:, 0]), set()).add(frozenset(places[axis].tolist()))
    parts = next(iter(lines.values()))
    return all(line == parts for line in lines.values()) and len({len(p) for p in parts}) == 1


def axes_of_pairs(pairs: Groups, mesh_axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes along which any source and its target differ; None for unknown devices.

    >>> axes_of_pairs(((0, 1), (1, 0), (2, 3), (3, 2)), {"data": 2, "tensor": 2})
    ('tensor',)
    """
    sizes = tuple(mesh_axes.values())
    if any(device >= np.prod(sizes) or len(pair) != 2 for pair in pairs for device in pair):
        return None
    differing = {axis for pair in pairs for axis in _differing(pair, sizes)}
    return tuple(name for i, name in enumerate(mesh_axes) if i in differing)


def _differing(devices: Iterable[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The positions of the axes on which these devices' coordinates are not all the same."""
    if not sizes:
        return ()
    places = np.array(np.unravel_index(list(devices), sizes))  # [axis, device]
    return tuple(int(axis) for axis in np.flatnonzero((places != places[:, :1]).any(axis=1)))


def _mesh_groups(found: re.Match) -> Groups | None:
    """Groups of `mesh['a'=2,'b'=4], device_ids=(...) {'a','b':(1)2}`, over whole or part axes."""
    axes = [item.rpartition("=") for item in found["axes"].split(",") if item]
    names = [name.strip().strip("'\"") for name, _, _ in axes]
    sizes = [int(size) for _, _, size in axes]
    devices = _mesh_devices(found["ids"], sizes)
    over: dict[int, list[tuple[int, int]]] = {}  # axis -> [(product before it, size)]
    for item in (item.strip() for item in found["over"].split(",") if item.strip()):
        name, before, size = _SUBAXIS.match(item).groups()
        if (name := name.strip("'\"")) not in names or devices is None:
            return None
        axis = names.index(name)
        part = (1, sizes[axis]) if before is None else (int(before), int(size))
        over.setdefault(axis, []).append(part)
    if devices is None:
        return None
    shape, joined = [], []
    for axis, size in enumerate(sizes):
        done = 1
        for before, part in sorted(over.get(axis, [])):
            shape += [before // done, part]
            joined.append(len(shape) - 1)
            done = before * part
        shape.append(size // done)
    kept = [i for i in range(len(shape)) if i not in joined]
    group = int(np.prod([shape[i] for i in joined], initial=1))
    return _rows(devices.reshape(shape).transpose(*kept, *joined).reshape(-1, group))


def _mesh_devices(text: str | None, sizes: list[int]) -> np.ndarray | None:
    """The mesh's devices, flat: 0, 1, 2, ... unless `device_ids` says otherwise."""
    total = int(np.prod(sizes))
    if not text:
        return np.arange(total)
    if found := _MESH_IDS.match(text.strip()):
        order = _iota(_numbers(found[1]), found[2])
    else:
        order = np.array(_numbers(re.sub(r"^\[[\d,]+\]", "", text.strip())))
    return order if order.size == total else None


def _iota(dims: tuple[int, ...], transpose: str | None) -> np.ndarray:
    """0, 1, 2, ... laid out as `dims`, transposed, flat."""
    order = np.arange(int(np.prod(dims))).reshape(dims)
    return (order.transpose(_numbers(transpose)) if transpose else order).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in table)
