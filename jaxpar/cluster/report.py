"""What a compiled program needs and does, per device: the result of `jaxpar.cluster.compile`.

The one idea: plain numbers in frozen dataclasses, so that a test can compare them; `print` and JSON
show the same numbers. Bytes and operations are those of one device and one step.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxpar.cluster.hlo_collectives import Collective
from jaxpar.cluster.hlo_flops import Flops
from jaxpar.cluster.hlo_overlap import Overlap
from jaxpar.cluster.target import Target

USABLE = 0.92
"""Share of a GPU's memory that a program may take: the CUDA context and NCCL's buffers, which XLA
does not count, need the rest (jaxpar's own allowance, about 6 GB of 80)."""


class Array(NamedTuple):
    """An array that a device holds when it needs the most memory.

    `kind` is argument or temporary; `shape` is the device's part; `name` where it comes from.
    """

    kind: str
    name: str
    shape: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device, as XLA counts them.

    Attributes:
      arguments, outputs: what goes in and comes out.
      temporaries: everything else, in one piece that XLA packs.
      aliased: outputs that take the place of donated arguments.
      peak: arguments + outputs - aliased + temporaries.
      device: the GPU's memory; None for emulated devices.
      arrays: what takes the most at the peak, largest first.
      host: bytes in the host's memory (remat "offload").
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    peak: int
    device: int | None
    arrays: tuple[Array, ...] = dataclasses.field(default=(), repr=False)
    host: int = 0

    @property
    def usable(self) -> int | None:
        """USABLE of the GPU's memory, None for emulated devices."""
        return None if self.device is None else int(USABLE * self.device)

    @property
    def left(self) -> int | None:
        """What remains of `usable`; negative where the program does not fit."""
        return None if self.usable is None else self.usable - self.peak


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind: the same operation, axes, type and payload.

    Attributes:
      op: such as `all-gather`.
      axis: mesh axes, outermost first, joined by "+"; "?" when they could not be told.
      dtype: the type on the wire.
      count: executions per step; not whole where stages differ; None when a loop is unknown.
      bytes: payload of one execution (`hlo_collectives.Collective.bytes`).
      total_bytes: count * bytes.
      wire_bytes: what a device sends per step, on a ring.
      crosses_nodes: whether any of its groups spans several nodes.
    """

    op: str
    axis: str
    dtype: str
    count: int | float | None
    bytes: int
    total_bytes: int | float | None
    wire_bytes: int | float | None
    crosses_nodes: bool


class Sums(NamedTuple):
    """Executions and bytes of several rows per step; None where a loop is unknown."""

    count: int | float | None
    total_bytes: int | float | None
    wire_bytes: int | float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What one step of a compiled program needs and does on each device of `target`.

    `print(report)` shows it as tables, `to_json()` gives the numbers, `diff` compares. `flops` is
    None and counts are None where a loop's number of iterations is not known. `text` is the
    optimized HLO.
    """

    title: str
    target: Target
    mesh_axes: Mapping[str, int]
    memory: Memory
    flops_by: Flops
    collectives: tuple[CollectiveRow, ...]
    overlap: tuple[Overlap, ...]
    warnings: tuple[str, ...]
    trace_seconds: float
    compile_seconds: float
    text: str = dataclasses.field(repr=False)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is at most USABLE of the GPU's memory; None for emulated devices."""
        return None if self.memory.left is None else self.memory.left >= 0

    @property
    def flops(self) -> int | float | None:
        """Floating-point operations of products, convolutions and attention."""
        return number(self.flops_by.total)

    @functools.cached_property
    def by_axis(self) -> dict[tuple[str, str], Sums]:
        """(operation, axis) -> executions and bytes of a step."""
        found: dict[tuple[str, str], Sums] = {}
        for row in self.collectives:
            before = found.get((row.op, row.axis), Sums(0, 0, 0))
            found[row.op, row.axis] = add(before, (row.count, row.total_bytes, row.wire_bytes))
        return found

    def to_json(self) -> dict:
        """The numbers as one JSON object; bytes, per step and device.

        `fits`, `memory` {arguments, outputs, temporaries, aliased, peak, device}, `flops`,
        `collectives` [{op, axis, count, bytes, total_bytes, crosses_nodes}], `overlap` [{op, axis,
        phase, exposed, flops_between}], `warnings`, `compile_seconds`.
        """
        memory = ("arguments", "outputs", "temporaries", "aliased", "peak", "device")
        row = ("op", "axis", "count", "bytes", "total_bytes", "crosses_nodes")
        return {
            "fits": self.fits,
            "memory": {name: getattr(self.memory, name) for name in memory},
            "flops": self.flops,
            "collectives": [{name: getattr(r, name) for name in row} for r in self.collectives],
            "overlap": [
                {
                    "op": o.op,
                    "axis": "+".join(o.axes),
                    "phase": o.phase,
                    "exposed": o.exposed,
                    "flops_between": number(o.flops_between),
                }
                for o in self.overlap
            ],
            "warnings": list(self.warnings),
            "compile_seconds": round(self.compile_seconds, 3),
        }

    def diff(self, other: "Report"):
        """What is different in `other`: memory, operations, collectives, what is exposed."""
        from jaxpar.cluster.report_diff import Diff

        return Diff(self, other)

    def __str__(self) -> str:
        from jaxpar.cluster.report_text import report_text

        return report_text(self)


def number(value) -> int | float | None:
    """An exact number as int where it is whole, else as float; None stays None."""
    if value is None:
        return None
    return int(value) if value == int(value) else float(value)


def add(before: Sums, more: tuple) -> Sums:
    """The sums of two; None where either is."""
    pairs = zip(before, more, strict=True)
    return Sums(*(None if a is None or b is None else a + b for a, b in pairs))


def collective_rows(
    found: Iterable[Collective], target: Target, numbers: tuple[int, ...]
) -> tuple[CollectiveRow, ...]:
    """Collectives gathered into rows, most bytes first; those without a partner left out.

    `numbers` are the target's device numbers in the order of the program's devices.
    """
    rows: dict[tuple, Sums] = {}
    for item in found:
        if not item.axes:
            continue
        groups = [[numbers[i] for i in group] for group in item.groups]
        crosses = target.crosses_nodes(groups or [numbers])
        key = (item.op, "+".join(item.axes), item.dtype, item.bytes, crosses)
        more = (item.count, item.total_bytes, item.total_wire_bytes)
        rows[key] = add(rows.get(key, Sums(0, 0, 0)), more)
    made = [
        CollectiveRow(op, axis, dtype, number(count), size, number(total), number(wire), crosses)
        for (op, axis, dtype, size, crosses), (count, total, wire) in rows.items()
    ]
    return tuple(sorted(made, key=lambda r: -(r.bytes if r.wire_bytes is None else r.wire_bytes)))
