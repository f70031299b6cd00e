"""What a compiled program computes while a collective is under way.

The one idea: optimized HLO is scheduled, so the order of the instructions of a computation is the
order in which they are issued. What stands between the start and the done of an asynchronous
collective hides it; a collective with no operations in between is exposed: the device waits for it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxpar.cluster.hlo_collectives import Collective, collectives
from jaxpar.cluster.hlo_flops import KINDS, operations_of
from jaxpar.cluster.hlo_flow import PASSED_ON, Flow, Placed
from jaxpar.cluster.hlo_text import Computation, Instruction, Program, parse
from jaxpar.cluster.hlo_walk import BranchShare, Count, Visit, walk

SCOPES = ("embed", "F", "head", "B", "embed_back")
"""Parts of a step that jaxpar names with `jax.named_scope`."""

PhaseOf = Callable[[Visit], str]

_NAMED = 4
_SYNCHRONOUS = re.compile(r"is_sync\W+true")
_INNERMOST = re.compile(r"^(?:(?:transpose|jvp|vmap)\()*([^()]*)\)*$")
_NO_WORK = {  # neither moves nor computes data on the device; what calls hold counts by itself
    "after-all", "async-done", "async-start", "async-update", "bitcast", "call", "conditional",
    "constant", "copy-done", "copy-start", "domain", "get-tuple-element", "opt-barrier",
    "parameter", "partition-id", "recv", "recv-done", "replica-id", "send", "send-done", "tuple",
    "while",
}  # fmt: skip
_COLLECTIVE = re.compile(r"^(all-|ragged-all|reduce-scatter|collective-)")


@dataclass(frozen=True)
class Overlap:
    """One collective in one place of the program, and what is computed between start and done.

    Attributes:
      op, axes, count, bytes, name, computation, op_name: as in `Collective`; `bytes` is the payload
        of one execution.
      phase: the part of a step that it belongs to.
      exposed: no operations in between: it is synchronous, its done is not found, or nothing is
        scheduled there but other collectives and memory-bound work.
      flops_between: operations of products, convolutions and attention in between, for one
        execution; what is in between several collectives counts for each of them. None when it
        contains a loop whose trip count is unknown.
      bytes_between: bytes that all work in between writes, for one execution.
      between: names of the instructions that do most of it, largest first.
    """

    op: str
    axes: tuple[str, ...]
    phase: str
    count: Count
    bytes: int
    exposed: bool
    flops_between: Count
    bytes_between: Count
    between: tuple[str, ...]
    name: str
    computation: str
    op_name: str = field(default="", repr=False)

    @property
    def total_bytes(self) -> Count:
        """Payload per step; None when the count is unknown."""
        return None if self.count is None else self.count * self.bytes


class Exposure(NamedTuple):
    """Sums over collectives, per device and step; None where a loop's trip count is unknown."""

    count: Count
    exposed_count: Count
    bytes: Count
    exposed_bytes: Count

    @property
    def share(self) -> float | None:
        """Exposed part of the payload, 0 to 1; None when it is unknown or nothing is sent."""
        if self.bytes is None or self.exposed_bytes is None or not self.bytes:
            return None
        return float(self.exposed_bytes / self.bytes)


def overlaps(
    program: str | Program,
    mesh_axes: Mapping[str, int],
    *,
    branch_share: BranchShare = 1.0,
    trip_counts: Mapping[str, int] | None = None,
    phase_of: PhaseOf | None = None,
) -> list[Overlap]:
    """List the collectives of a compiled program with what hides them, in the order of the text.

    Args:
      program: `compiled.as_text()`, or what `parse` made of it.
      mesh_axes, branch_share, trip_counts: as in `collectives`.
      phase_of: the part of a step that a visited collective belongs to; by default `scope` of its
        `op_name`. What XLA made without a name gets the name of the loop or call around it.

    Synchronous collectives are in the list, exposed. A start in a loop whose done is in the next
    iteration has in between what remains of the one and what comes before the done in the other.
    Raises ValueError for a program that is not scheduled, and as `collectives` does.

    >>> text = '''HloModule m, is_scheduled=true, num_partitions=2
    ... ENTRY %main (x: f32[8,8]) -> (f32[8,8], f32[8,8]) {
    ...   %x = f32[8,8]{1,0} parameter(0)
    ...   %s = f32[8,8]{1,0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
    ...   %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ...   %d = f32[8,8]{1,0} all-reduce-done(%s)
    ...   ROOT %t = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%y, %d)
    ... }'''
    >>> (found,) = overlaps(text, {"data": 2})
    >>> found.exposed, found.flops_between, found.bytes_between, found.between
    (False, 1024, 256, ('y',))
    """
    program = parse(program) if isinstance(program, str) else program
    if program.header.get("is_scheduled") != "true":
        raise ValueError(
            f"module {program.name} is not scheduled; only is_scheduled=true means that the order "
            "of the text is the order of issue; give the text of a compiled program, "
            "compiled.as_text()"
        )
    settings = {"branch_share": branch_share, "trip_counts": trip_counts}
    reader = _Reader(Flow(program), settings, phase_of or (lambda v: scope(v.instruction.op_name)))
    return [reader.overlap(item) for item in collectives(program, mesh_axes, **settings)]


def by_phase(
    found: Iterable[Overlap],
) -> dict[tuple[str, tuple[str, ...], str], Exposure]:
    """Sum overlaps per (operation, axes, phase): executions and payload bytes, and those exposed.

    >>> by_phase([])
    {}
    """
    sums: dict[tuple[str, tuple[str, ...], str], Exposure] = {}
    for item in found:
        before = sums.get((item.op, item.axes, item.phase), Exposure(0, 0, 0, 0))
        new = (item.count, item.total_bytes)
        exposed = new if item.exposed else (0, 0)
        parts = zip(before, (new[0], exposed[0], new[1], exposed[1]), strict=True)
        sums[item.op, item.axes, item.phase] = Exposure(*(_plus(a, b) for a, b in parts))
    return sums


def scope(op_name: str) -> str:
    """The outermost of SCOPES in an `op_name`, or "step".

    >>> scope("jit(step)/shard_map/while/body/transpose(jvp(F))/while/body/all_gather")
    'F'
    >>> scope("jit(step)/reduce_sum")
    'step'
    """
    for part in op_name.split("/"):
        found = _INNERMOST.match(part)
        if found and found[1] in SCOPES:
            return found[1]
    return "step"


class _Work(NamedTuple):
    """What an instruction does when it runs once, with everything that it calls."""

    flops: Count = 0
    bytes: Count = 0


@dataclass(frozen=True)
class _Reader:
    """The searches for all collectives of a program; work is counted once per computation."""

    flow: Flow
    settings: Mapping
    phase_of: PhaseOf
    known: dict[str, dict[str, _Work]] = field(default_factory=dict)

    def overlap(self, item: Collective) -> Overlap:
        inside = self.flow.program.computations[item.computation]
        collective = inside.by_name[item.name]
        work = self._hidden_by(inside, collective)
        flops, written = _sum(part for _, part in work)
        work = sorted(work, key=lambda pair: (_size(pair[1].flops), _size(pair[1].bytes)))[::-1]
        visit = Visit(
            self._named(inside, collective), inside, item.count, item.in_conditional,
            asynchronous=item.asynchronous,
        )  # fmt: skip
        return Overlap(
            op=item.op,
            axes=item.axes,
            phase=self.phase_of(visit),
            count=item.count,
            bytes=item.bytes,
            exposed=flops == 0,
            flops_between=_whole(flops),
            bytes_between=_whole(written),
            between=tuple(dict.fromkeys(name for name, part in work if part != _Work()))[:_NAMED],
            name=item.name,
            computation=item.computation,
            op_name=item.op_name,
        )

    def _hidden_by(self, inside: Computation, collective: Instruction) -> list[tuple[str, _Work]]:
        placed = self.flow.start_of(inside, collective)
        if placed is None or any(_is_synchronous(i) for i in (collective, placed[1])):
            return []
        between = self.flow.between(*placed) or ()
        return [(i.name, self.work(where)[i.name]) for where, i in between]

    def work(self, inside: Computation) -> dict[str, _Work]:
        """What each instruction of a computation does."""
        if inside.name not in self.known:
            self.known[inside.name] = self._count(inside)
        return self.known[inside.name]

    def _count(self, inside: Computation) -> dict[str, _Work]:
        alone = replace(self.flow.program, entry=inside.name)
        found: dict[str, _Work] = {}
        top = ""
        for visit in walk(alone, **self.settings):
            if visit.computation is inside:
                top = visit.instruction.name
            amounts = (_flops(visit), self._written(visit))
            each = (_times(visit.count, amount) for amount in amounts)
            found[top] = _Work(*map(_plus, found.get(top, _Work()), each))
        return found

    def _written(self, visit: Visit) -> int:
        """Bytes that an instruction writes; a fusion's parts write nothing of their own."""
        instruction = visit.instruction
        if instruction.opcode in _NO_WORK or _COLLECTIVE.match(instruction.opcode):
            return 0
        callers = self.flow.callers.get(visit.computation.name, ())
        if any(call.opcode == "fusion" for _, call in callers):
            return 0
        if instruction.opcode != "fusion":
            return _result_bytes(visit.computation, instruction)
        (callee,) = next(iter(instruction.called.values()))
        inside = self.flow.program.computations[callee]
        return _result_bytes(inside, inside.root)

    def _named(self, inside: Computation, instruction: Instruction) -> Instruction:
        """The instruction with, where it has no `op_name`, that of the nearest caller with one."""
        here: Placed = (inside, instruction)
        while not here[1].op_name and len(callers := self.flow.callers.get(here[0].name, ())) == 1:
            here = callers[0]
        metadata = here[1].attributes.get("metadata", "")
        return replace(instruction, attributes={**instruction.attributes, "metadata": metadata})


def _flops(visit: Visit) -> int:
    kinds, amount = operations_of(visit.instruction, visit.computation.by_name) or ((), 0)
    return amount if set(kinds) & set(KINDS) else 0


def _result_bytes(inside: Computation, result: Instruction) -> int:
    """Bytes of a result; an update in place counts what it writes, not the whole buffer."""
    value = result
    while value.opcode in PASSED_ON:
        value = inside.by_name[value.operands[0]]
    if value.opcode == "tuple":
        return sum(_result_bytes(inside, inside.by_name[name]) for name in value.operands)
    if value.opcode == "dynamic-update-slice":
        return inside.by_name[value.operands[1]].shape.bytes
    if value.attributes.get("custom_call_target", "").startswith('"__cu') and value.shape.parts:
        return sum(part.bytes for part in value.shape.parts[:-1])  # the last one is scratch space
    return result.shape.bytes


def _is_synchronous(instruction: Instruction) -> bool:
    return bool(_SYNCHRONOUS.search(instruction.attributes.get("backend_config", "")))


def _sum(works: Iterable[_Work]) -> _Work:
    total = _Work()
    for work in works:
        total = _Work(*map(_plus, total, work))
    return total


def _plus(a: Count, b: Count) -> Count:
    return None if a is None or b is None else a + b


def _times(count: Count, amount: int) -> Count:
    """The product; nothing is nothing, however often."""
    return 0 if amount == 0 else None if count is None else count * amount


def _whole(count: Count) -> Count:
    """An int where it is one; shares of branches may be fractions."""
    return count if count is None else int(count) if count == int(count) else float(count)


def _size(count: Count) -> float:
    return float("inf") if count is None else float(count)
