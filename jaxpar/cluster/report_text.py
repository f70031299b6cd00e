"""A report in words and columns, 100 characters wide.

The one idea: one table for each question: does it fit and what takes the memory, what goes over
which link, what hides it, what is probably not meant.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence

from jaxpar.cluster.hlo_overlap import Overlap, by_phase
from jaxpar.cluster.report import USABLE, CollectiveRow, Memory, Report, Sums, add, number
from jaxpar.layout import AXES

WIDTH = 100
ARRAYS_SHOWN = 10
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_OPERATIONS = ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))


def report_text(report: Report) -> str:
    """The whole report."""
    parts = [
        _head(report),
        _memory(report.memory),
        _arrays(report.memory),
        _flops(report),
        _collectives(report),
        _overlap(report.overlap),
        _warnings(report.warnings),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def size(count: int | float | None) -> str:
    """Bytes in the unit that fits.

    >>> size(3 * 2**20), size(12), size(None)
    ('3.00 MiB', '12 B', '?')
    """
    return _in_units(count, _BYTES, "B")


def operations(count: int | float | None) -> str:
    """Floating-point operations in the unit that fits.

    >>> operations(270.1e12)
    '270.10 TFLOP'
    """
    return _in_units(count, _OPERATIONS, "FLOP")


def _in_units(count, units, one: str) -> str:
    if count is None:
        return "?"
    for unit, name in units:
        if abs(count) >= unit:
            return f"{float(count) / unit:,.2f} {name}"
    return f"{float(count):,.0f} {one}"


def times(count: int | float | None) -> str:
    """A number of executions; not whole where stages differ.

    >>> times(1200), times(2.5), times(None)
    ('1,200', '2.5', '?')
    """
    if count is None:
        return "?"
    return f"{count:,}" if isinstance(count, int) else f"{count:,.1f}"


def columns(
    head: Sequence[str] | None, rows: Iterable[Sequence[str]], right: Sequence[int]
) -> list[str]:
    """Rows under a head; those columns in `right` to the right, lines cut at WIDTH."""
    rows = [*([] if head is None else [head]), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(cells))
        lines.append(cut(f"  {line}".rstrip()))
    return lines


def cut(text: str, width: int = WIDTH) -> str:
    """Text of at most `width` characters; what is left out shows as "...".

    >>> cut("abcdefgh", 6)
    'abc...'
    """
    return text if len(text) <= width else text[: width - 3] + "..."


def _head(report: Report) -> list[str]:
    lines = textwrap.wrap(report.title, WIDTH)
    seconds = f"traced in {report.trace_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s"
    return [*lines, f"compiled for {report.target}; {seconds}"]


def _memory(memory: Memory) -> list[str]:
    rows = [
        ("arguments", memory.arguments, ""),
        ("outputs", memory.outputs, ""),
        ("aliased", memory.aliased, "outputs that take the place of donated arguments"),
        ("temporaries", memory.temporaries, ""),
        ("peak", memory.peak, "arguments + outputs - aliased + temporaries"),
    ]
    if memory.device is not None:
        share = f"{100 * USABLE:.0f} % of {size(memory.device)}; the rest is for the CUDA context"
        over = f"does not fit: {size(-memory.left)} too much" if memory.left < 0 else "it fits"
        rows += [("usable", memory.usable, f"{share} and NCCL")]
        rows += [("left", memory.left, over)]
    if memory.host:
        rows += [("in the host's memory", memory.host, "")]
    cells = [(name, size(count), note) for name, count, note in rows]
    return ["memory per device", *columns(None, cells, right=(1,))]


def _arrays(memory: Memory) -> list[str]:
    if not memory.arrays:
        return []
    rows = [
        (array.kind, size(array.bytes), array.shape, origin(array.name))
        for array in memory.arrays[:ARRAYS_SHOWN]
    ]
    return ["largest arrays at the peak", *columns(None, rows, right=(1,))]


def origin(name: str) -> str:
    """A place in the program without the words that every place has.

    >>> origin("jit(step)/shard_map/segment 2/while/body/closed_call/F/dot_general")
    'segment 2/F/dot_general'
    """
    return re.sub(r"(?:jit\([^/]*\)|shard_map|while/body|closed_call|checkpoint|cond)/", "", name)


def _flops(report: Report) -> list[str]:
    by, total = report.flops_by, report.flops
    if total is None:
        return ["operations: not known, since a loop's number of iterations is not"]
    parts = [f"products {operations(by.dots)}"]
    parts += [f"convolutions {operations(by.convolutions)}"] if by.convolutions else []
    parts += [f"attention {operations(by.attention)}"] if by.attention else []
    lines = [f"operations per device and step: {operations(total)} ({', '.join(parts)})"]
    if by.causal_attention:
        lines += [f"  of them {operations(by.causal_attention)} under a causal mask, half of which "
                  "cuDNN skips"]  # fmt: skip
    return lines


def _collectives(report: Report) -> list[str]:
    if not report.collectives:
        return ["nothing is sent"]
    groups: dict[tuple, list[CollectiveRow]] = {}
    for row in report.collectives:
        groups.setdefault((row.axis, row.op, row.dtype, row.crosses_nodes), []).append(row)
    rows = []
    for (axis, op, dtype, crosses), members in sorted(groups.items(), key=_by_axis):
        total = Sums(0, 0, 0)
        for row in members:
            total = add(total, (row.count, row.total_bytes, row.wire_bytes))
        in_all = "?" if total.total_bytes is None else f"{number(total.total_bytes):,.0f}"
        where = "nodes" if crosses else "inside"
        each = _range(row.bytes for row in members)
        rows.append((axis, op, dtype, times(number(total.count)), each, in_all, where))
    head = ("axis", "operation", "type", "times", "bytes each", "bytes in all", "link")
    title = "sent per device and step (link: inside a node, or across nodes)"
    return [title, *columns(head, rows, right=(3, 4, 5))]


def _range(counts: Iterable[int]) -> str:
    counts = sorted(counts)
    least, most = size(counts[0]), size(counts[-1])
    if least == most:
        return most
    (low, unit), (_, same) = least.split(), most.split()
    return f"{low} - {most}" if unit == same else f"{least} - {most}"


def _by_axis(item) -> tuple:
    """Outermost axis first, then the operation."""
    axis, op, dtype, crosses = item[0]
    places = [AXES.index(a) if a in AXES else len(AXES) for a in axis.split("+")]
    return places, axis, op, dtype, crosses


def _overlap(overlap: Sequence[Overlap]) -> list[str]:
    """Per axis, operation and phase: how much of it waits, and what hides the rest."""
    if not any(o.axes for o in overlap):
        return []
    rows = []
    for (op, axes, phase), sums in by_phase(overlap).items():
        if not axes:
            continue
        same = [o for o in overlap if (o.op, o.axes, o.phase) == (op, axes, phase)]
        hidden = [o for o in same if not o.exposed]
        counts = times(number(sums.count)), times(number(sums.exposed_count))
        rows.append(("+".join(axes), op, phase, *counts, *_hidden_by(hidden)))
    rows.sort(key=lambda row: (_by_axis(((row[0], row[1], "", False),)), row[2]))
    head = ("axis", "operation", "phase", "times", "exposed", "hidden by", "")
    title = "overlap (exposed: no operations between start and done; hidden by: those of the best)"
    return [title, *columns(head, rows, right=(3, 4, 5))]


def _hidden_by(hidden: list[Overlap]) -> tuple[str, str]:
    """(operations, the instructions that do most of them) for the best hidden of some."""
    if not hidden:
        return "-", ""
    most = max(hidden, key=lambda o: float(o.flops_between or 0))
    return operations(most.flops_between), ", ".join(most.between)


def _warnings(warnings: Sequence[str]) -> list[str]:
    lines = []
    for text in warnings:
        lines += textwrap.wrap(
            f"warning: {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False
        )
    return lines
