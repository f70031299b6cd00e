"""How often each instruction of a compiled program runs in one step.

The one idea: start at ENTRY with count 1 and follow the calls; a loop multiplies the count by its
trip count, a branch by the share of executions that take it. A trip count that cannot be known
makes the count None from there on down, and the loop's name travels along, so that nothing is ever
counted once by mistake.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from jaxpar.cluster.hlo_text import Computation, Instruction, Program, Shape

Count = int | float | None
BranchShare = float | Callable[[Instruction, int], float]

_COMBINERS = {  # what they call is applied to single elements
    "all-reduce", "all-reduce-start", "map", "reduce", "reduce-scatter", "reduce-scatter-start",
    "reduce-window", "scatter", "select-and-scatter", "sort", "topk",
}  # fmt: skip
_KNOWN_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_MAX_SIMULATED_TRIPS = 20_000


@dataclass(frozen=True)
class Visit:
    """An instruction in its place: `count` executions per step (None: some loop is unknown)."""

    instruction: Instruction
    computation: Computation
    count: Count
    in_conditional: bool = False
    unknown_loops: tuple[str, ...] = ()
    asynchronous: bool = False


def walk(
    program: Program,
    *,
    branch_share: BranchShare = 1.0,
    trip_counts: Mapping[str, int] | None = None,
) -> Iterator[Visit]:
    """Yield a `Visit` for every instruction reached from ENTRY, once per place that calls it.

    Args:
      program: the parsed program.
      branch_share: how many of a conditional's executions take a branch: one number for all, or a
        function of the `conditional` instruction and the branch's index. The default, 1.0, counts
        every branch as always taken (an upper bound); visits below have `in_conditional=True`.
      trip_counts: trip counts by the `while` instruction's name, for loops whose count the program
        does not tell; given names win over what the program says.

    Raises ValueError when `trip_counts` names a loop that the program does not have.
    """
    trips = dict(trip_counts or {})
    loops = {
        instruction.name
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
    }
    if unknown := sorted(set(trips) - loops):
        raise ValueError(
            f"trip_counts names {unknown[0]!r}; the program's loops are {sorted(loops)}; use one "
            "of these names"
        )
    entry = program.computations[program.entry]
    yield from _walk(program, entry, Visit(entry.root, entry, 1), branch_share, trips)


def _walk(
    program: Program, inside: Computation, at: Visit, share: BranchShare, trips: dict[str, int]
) -> Iterator[Visit]:
    for instruction in inside.instructions:
        here = replace(at, instruction=instruction, computation=inside)
        yield here
        if not instruction.called:
            continue
        for name, below in _calls(program, here, share, trips):
            yield from _walk(program, program.computations[name], below, share, trips)


def _calls(
    program: Program, here: Visit, share: BranchShare, trips: dict[str, int]
) -> list[tuple[str, Visit]]:
    """The computations that an instruction runs, each with the count it runs at."""
    instruction = here.instruction
    opcode, called = instruction.opcode, instruction.called
    if opcode in _COMBINERS or opcode.endswith(("-update", "-done")):
        return []
    if opcode == "while":
        times = trips.get(instruction.name, trip_count(program, here.computation, instruction))
        if times is None:
            lost = (*here.unknown_loops, instruction.name)
            unknown = replace(here, count=None, unknown_loops=lost)
            return [(called["condition"][0], unknown), (called["body"][0], unknown)]
        return [
            (called["condition"][0], _times(here, times + 1)),
            (called["body"][0], _times(here, times)),
        ]
    if opcode == "conditional":
        found = []
        for index, name in enumerate(branches(instruction)):
            part = share(instruction, index) if callable(share) else share
            found.append((name, replace(_times(here, part), in_conditional=True)))
        return found
    below = replace(here, asynchronous=here.asynchronous or opcode.endswith("-start"))
    return [(name, below) for names in called.values() for name in names]


def branches(conditional: Instruction) -> tuple[str, ...]:
    """The branch computations of a `conditional` in order; for a predicate, true comes first."""
    called = conditional.called
    if "branch_computations" in called:
        return called["branch_computations"]
    return called["true_computation"] + called["false_computation"]


def _times(visit: Visit, factor: float) -> Visit:
    if visit.count is None:
        return visit
    product = visit.count * factor
    whole = isinstance(product, float) and product.is_integer()
    return replace(visit, count=int(product) if whole else product)


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs its body, or None when the program does not tell.

    Reads XLA's own `known_trip_count`; without it, runs the loop's integer scalars from their
    constant start values through body and condition until the condition is false.
    """
    if known := _KNOWN_TRIPS.search(loop.attributes.get("backend_config", "")):
        return int(known[1])
    condition = program.computations[loop.called["condition"][0]]
    body = program.computations[loop.called["body"][0]]
    state = evaluate(program, computation, loop.operands[0], ())
    for trips in range(_MAX_SIMULATED_TRIPS):
        goes_on = evaluate(program, condition, condition.root.name, (state,))
        if not isinstance(goes_on, int):
            return None
        if not goes_on:
            return trips
        state = evaluate(program, body, body.root.name, (state,))
    return None


Value = int | tuple | None
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": max,
    "minimum": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}
_DIRECTIONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def evaluate(program: Program, inside: Computation, name: str, given: tuple[Value, ...]) -> Value:
    """The integer (or tuple of such) that an instruction computes; None where it is not known.

    `given` are the values of the computation's parameters, None for what is not known.
    """
    known: dict[str, Value] = {}
    for instruction in _needed(inside, name):
        values = [known.get(operand) for operand in instruction.operands]
        known[instruction.name] = _value(program, instruction, values, given)
    return known.get(name)


def _needed(inside: Computation, name: str) -> list[Instruction]:
    """The integer scalars and tuples that `name` depends on, in the program's own order."""
    wanted, found = {name}, []
    for instruction in reversed(inside.instructions):  # operands always stand before their users
        if instruction.name in wanted and _countable(instruction.shape):
            found.append(instruction)
            wanted.update(instruction.operands)
    return found[::-1]


def _value(
    program: Program, instruction: Instruction, values: list[Value], given: tuple[Value, ...]
) -> Value:
    opcode = instruction.opcode
    if opcode == "parameter":
        index = int(instruction.literal)
        return given[index] if index < len(given) else None
    if opcode == "constant":
        return _integer(instruction.literal)
    if opcode == "tuple":
        return tuple(values)
    if opcode == "get-tuple-element":
        index = int(instruction.attributes["index"])
        return values[0][index] if isinstance(values[0], tuple) else None
    if opcode in ("copy", "bitcast", "convert"):
        return values[0]
    if opcode in ("fusion", "call"):
        (callee,) = next(iter(instruction.called.values()))
        below = program.computations[callee]
        return evaluate(program, below, below.root.name, tuple(values))
    if len(values) != 2 or not all(isinstance(value, int) for value in values):
        return None
    if opcode == "compare":
        return int(_DIRECTIONS[instruction.attributes["direction"]](*values))
    return _ARITHMETIC[opcode](*values) if opcode in _ARITHMETIC else None


def _countable(shape: Shape) -> bool:
    if shape.dtype == "tuple":
        return True
    return not shape.dims and (shape.dtype[0] in "su" or shape.dtype == "pred")


def _integer(literal: str) -> int | None:
    if literal in ("true", "false"):
        return int(literal == "true")
    return int(literal) if literal.lstrip("-").isdigit() else None
