"""What a compiled program sends that is legal and probably not meant, each in one sentence.

The one idea: a wrong sharding or type still compiles and still computes the right thing; it shows
only in the collectives. Each check here looks at one collective and what stands around it; findings
of one kind are told once, with the largest as the example.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxpar.cluster.hlo_collectives import UNKNOWN_AXES, Collective
from jaxpar.cluster.hlo_flow import Flow
from jaxpar.cluster.hlo_promotion import convert_before, converts_after, only
from jaxpar.cluster.hlo_reshards import MOVES, by_partitioner, collectives_before, kept_part
from jaxpar.cluster.hlo_text import Computation, Instruction, Program, parse
from jaxpar.cluster.hlo_walk import Count, trip_count

TINY = 1024
"""Bytes a step below which a collective that the layout does not ask for is not told by itself."""


class Expected(Protocol):
    """A collective that a layout asks for, such as `jaxpar.costs.Transfer`; `bytes` of one
    execution, `count` executions per step."""

    op: str
    axes: tuple[str, ...]
    bytes: int
    count: int


def find(
    program: str | Program,
    collectives: Iterable[Collective],
    *,
    expected: Iterable[Expected] | None = None,
) -> list[str]:
    """Sentences on what is probably not meant, the most bytes per step first.

    Args:
      program: `compiled.as_text()`, or what `parse` made of it.
      collectives: what `collectives` read from this program.
      expected: what the layout asks for, one row per kind of collective; rows may repeat. What is
        not among them, by operation, axes and bytes of one execution, is told, and what is among
        them is not called unnecessary. None: nothing is known.

    Told are: f32 on the wire where bf16 was asked for or would do; a collective in a loop that
    reads nothing the loop changes; changes of sharding that the partitioner had to do; what the
    layout does not ask for; and whatever the readers could not map.

    >>> find("HloModule m\\nENTRY %e (x: f32[]) -> f32[] {\\n  ROOT %x = f32[] copy(x)\\n}", [])
    []
    """
    program = parse(program) if isinstance(program, str) else program
    reader = _Reader(Flow(program), _Asked(expected))
    items = [item for item in collectives if item.axes]
    findings = [finding for item in items for finding in reader.findings(item)]
    groups: dict[tuple, list[_Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.kind, []).append(finding)
    told = [_told(group) for group in groups.values()]
    return [text for _, text in sorted(told, key=lambda pair: -pair[0])]


class _Finding(NamedTuple):
    """`kind` is equal for findings that are told together."""

    kind: tuple
    item: Collective
    text: str


def _told(group: list[_Finding]) -> tuple[float, str]:
    """(bytes per step, the sentence) for findings of one kind."""
    total = sum(_step_bytes(finding.item) for finding in group)
    if group[0].kind == ("tiny",):
        many = f"{len(group)} collectives of" if len(group) > 1 else "a collective of"
        return total, (
            f"{many} less than {TINY} bytes a step that the layout does not ask for: "
            f"{_number(total)} bytes a step in all"
        )
    first = max(group, key=lambda finding: _step_bytes(finding.item))
    if len(group) == 1:
        return total, first.text
    return total, (
        f"{first.text}; and {len(group) - 1} more like it, {_number(total)} bytes a step in all"
    )


class _Asked:
    """Sizes and executions that a layout asks for, by operation and axes."""

    def __init__(self, expected: Iterable[Expected] | None):
        self.known = expected is not None
        self.counts: dict[tuple[str, tuple[str, ...]], dict[int, int]] = {}
        for row in expected or ():
            sizes = self.counts.setdefault((row.op, row.axes), {})
            sizes[row.bytes] = sizes.get(row.bytes, 0) + row.count

    def has(self, item: Collective, pieces: Iterable[int]) -> bool:
        """Whether the collective, or every one of its pieces, has a size that is asked for."""
        sizes = self.sizes(item)
        return item.asked_bytes in sizes or all(piece in sizes for piece in pieces)

    def as_often(self, item: Collective, pieces: Iterable[int]) -> bool:
        """Whether these executions are asked for."""
        counts = self.counts.get((item.op, item.axes), {})
        often = min((counts.get(piece, 0) for piece in pieces), default=0)
        return item.count is not None and item.count <= max(often, counts.get(item.asked_bytes, 0))

    def sizes(self, item: Collective) -> list[int]:
        return sorted(self.counts.get((item.op, item.axes), ()), reverse=True)


@dataclass(frozen=True)
class _Reader:
    """The checks of one collective; each yields what it finds."""

    flow: Flow
    asked: _Asked

    def findings(self, item: Collective) -> Iterator[_Finding]:
        inside = self.flow.program.computations[item.computation]
        instruction = inside.by_name[item.name]
        for warning in filter(None, item.warning.split("; ")):
            yield _Finding(("warning", warning), item, f"{_what(item)}: {warning}")
        pieces = list(self._pieces(item, *self._start(inside, instruction)))
        asked = self.asked.has(item, pieces)
        tiny = item.total_bytes is not None and item.total_bytes < TINY
        moved = []
        if not tiny:
            yield from self._wide(item, inside, instruction, asked)
            if not self.asked.as_often(item, pieces):
                yield from self._in_loop(item, inside, instruction)
            moved = [] if asked else list(self._reshard(item, inside, instruction))
            yield from moved
        if self.asked.known and not asked and not moved and item.axes != UNKNOWN_AXES:
            yield self._unasked(item, tiny)

    def _start(
        self, inside: Computation, instruction: Instruction
    ) -> tuple[Computation, Instruction]:
        """Where a collective's operands are: at its start, or the collective itself."""
        return self.flow.start_of(inside, instruction) or (inside, instruction)

    def _pieces(self, item: Collective, inside: Computation, start: Instruction) -> Iterator[int]:
        """Bytes of the arrays that XLA combined, as buffers or joined into one."""
        for buffer, name in zip(item.buffers, start.operands, strict=False):
            where, value = self.flow.source(inside, name)
            parts = [buffer.bytes]
            if value.opcode == "concatenate":
                parts = [where.by_name[part].shape.bytes for part in value.operands]
            yield from (part * buffer.asked_bytes // max(buffer.bytes, 1) for part in parts)

    def _wide(
        self, item: Collective, inside: Computation, instruction: Instruction, asked: bool
    ) -> Iterator[_Finding]:
        if item.promoted_from:
            yield _Finding(
                ("promoted", item.op, item.axes), item,
                f"{_what(item)}, where {item.promoted_from} was asked for: XLA "
                f"widened it for this target; {_number(item.asked_bytes)} bytes would do",
            )  # fmt: skip
            return
        if asked:
            return
        inside, start = self._start(inside, instruction)
        found = [
            (index, *_narrow(self.flow.program, inside, start, index))
            for index, buffer in enumerate(item.buffers)
            if buffer.dtype in ("f32", "f64") and len(item.buffers) <= len(start.operands)
        ]
        found = [(item.buffers[index].bytes, narrow, why) for index, narrow, why in found if narrow]
        if found:
            _, narrow, why = max(found)
            loss = "" if item.op in MOVES else ", with less precise sums"
            yield _Finding(
                ("wide", item.op, item.axes), item,
                f"{_what(item)} sends {_number(sum(b for b, _, _ in found))} bytes {why}; as "
                f"{narrow} it would send less{loss}",
            )  # fmt: skip

    def _in_loop(
        self, item: Collective, inside: Computation, instruction: Instruction
    ) -> Iterator[_Finding]:
        inside, start = self._start(inside, instruction)
        loops = [self.flow.repeating_loop(inside, name) for name in start.operands]
        if not loops or None in loops:
            return
        outside, loop = loops[0]
        trips = trip_count(self.flow.program, outside, loop)
        if trips is None or trips > 1:
            often = "an unknown number of" if trips is None else trips
            yield _Finding(
                ("loop", item.op, item.axes), item,
                f"{_what(item)} reads nothing that the loop around it ({loop.name}, {often} "
                "iterations) changes; before the loop once would do",
            )  # fmt: skip

    def _reshard(
        self, item: Collective, inside: Computation, instruction: Instruction
    ) -> Iterator[_Finding]:
        if not by_partitioner(instruction, item):
            return
        before = list(collectives_before(self.flow, inside, instruction))
        kept = kept_part(self.flow, inside, instruction) if item.op == "all-gather" else None
        kind, why = "reshard", "it changes a sharding, and the program has no collective for that"
        if kept is not None and kept < item.bytes:
            kind, why = "rematerialized", f"each device then keeps {_number(kept)} bytes of it"
            why += " (a full rematerialization, the partitioner's last resort)"
        elif before:
            ops = sorted({source.opcode.removesuffix("-done") for source in before})
            kind, why = "chain", f"it moves again what {' and '.join(ops)} has just moved"
        yield _Finding(
            (kind, item.op, item.axes), item, f"the partitioner put in {_what(item)}: {why}"
        )

    def _unasked(self, item: Collective, tiny: bool) -> _Finding:
        if tiny:
            return _Finding(("tiny",), item, "")
        over, sizes = "+".join(item.axes), self.asked.sizes(item)
        asks = f"no {item.op} over {over}"
        if sizes:
            more = f" and {len(sizes) - 3} more sizes" if len(sizes) > 3 else ""
            asks = f"{' or '.join(map(_number, sizes[:3]))}{more} bytes"
        return _Finding(
            ("unasked", item.op, item.axes, item.bytes), item,
            f"{_what(item)} is more than the layout asks for; it asks for {asks}",
        )  # fmt: skip


def _narrow(
    program: Program, inside: Computation, start: Instruction, index: int
) -> tuple[str | None, str]:
    """(the narrower type that would do for operand `index` of a collective, why)."""
    before = convert_before(program, inside, inside.by_name[start.operands[index]]).dtype
    if before is not None:
        return before, f"that were {before} just before"
    element = index if len(start.operands) > 1 else None
    after = only(converts_after(program, inside, start, element)).dtype
    return after, f"that are only read as {after}"


def _what(item: Collective) -> str:
    """`all-gather over data of 8,192 bytes of bf16, 32 times a step (jit(step)/all_gather)`."""
    often = {None: "an unknown number of times", 1: "once"}.get(item.count)
    often = often or f"{_number(item.count)} times"
    return (
        f"{item.op} over {'+'.join(item.axes)} of {_number(item.bytes)} bytes of {item.dtype}, "
        f"{often} a step ({item.op_name or item.name})"
    )


def _number(count: Count) -> str:
    return f"{int(count):,}" if count == int(count) else f"{float(count):,.1f}"


def _step_bytes(item: Collective) -> float:
    return float(item.bytes if item.total_bytes is None else item.total_bytes)
