"""Where a value goes and where it comes from, across the computations of a program.

The one idea: a value is passed on by instructions that do nothing to it (tuples and their
elements, bitcasts, copies) and by calls: a loop hands its tuple to its body, the body's root is the
next iteration's parameter and in the end the loop's result. Following these steps finds what stands
between the start and the done of a collective, and whether a loop changes what a collective reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jaxpar.cluster.hlo_text import Computation, Instruction, Program

Placed = tuple[Computation, Instruction]
"""An instruction and the computation that it stands in."""

PASSED_ON = ("bitcast", "copy", "opt-barrier", "optimization-barrier")
"""Operations whose result is their operand."""

_EFFECTS = ("rng", "rng-bit-generator", "infeed", "recv", "recv-done")


@dataclass(frozen=True)
class Flow:
    """A program with an index of what calls what; all searches are from here."""

    program: Program
    _places: dict[str, dict[str, int]] = field(default_factory=dict, repr=False)
    _known: dict[str, dict] = field(default_factory=dict, repr=False)

    @cached_property
    def callers(self) -> Mapping[str, tuple[Placed, ...]]:
        """For each computation, the instructions that run it; an async pair counts once."""
        found: dict[str, list[Placed]] = {}
        for inside in self.program.computations.values():
            for instruction in inside.instructions:
                if instruction.called and not instruction.opcode.endswith(("-update", "-done")):
                    for name in (n for names in instruction.called.values() for n in names):
                        found.setdefault(name, []).append((inside, instruction))
        return {name: tuple(callers) for name, callers in found.items()}

    def place(self, inside: Computation, name: str) -> int:
        """The position of an instruction in its computation: the order of issue."""
        if inside.name not in self._places:
            order = {instruction.name: i for i, instruction in enumerate(inside.instructions)}
            self._places[inside.name] = order
        return self._places[inside.name][name]

    def start_of(self, inside: Computation, collective: Instruction) -> Placed | None:
        """The instruction that starts a collective; None where it is synchronous.

        That is the collective itself, or the `async-start` around the computation it stands in.
        """
        if collective.opcode.endswith("-start") or collective.opcode == "send":
            return inside, collective
        for caller, start in self.callers.get(inside.name, ()):
            if start.opcode == "async-start":
                return caller, start
        return None

    def between(self, inside: Computation, start: Instruction) -> tuple[Placed, ...] | None:
        """What is issued after an asynchronous start and before its done, in order.

        The done may stand in the next iteration of the loop around the start, in a loop that gets
        the start's value, or after the loop. None when there is no done that this finds.
        """
        search = _Search(self, set())
        return search.from_value(inside, start.name, (), self.place(inside, start.name) + 1)

    def source(self, inside: Computation, name: str) -> Placed:
        """What makes a value: the instruction behind bitcasts, copies and the roots of fusions."""
        value = inside.by_name[name]
        while value.opcode in (*PASSED_ON, "fusion"):
            if value.opcode == "fusion":
                (callee,) = next(iter(value.called.values()))
                inside = self.program.computations[callee]
                value = inside.root
            else:
                value = inside.by_name[value.operands[0]]
        return inside, value

    def repeating_loop(self, inside: Computation, name: str) -> Placed | None:
        """The innermost loop around a value, if the value is the same in all its iterations.

        None where the value may change, or where no loop is around it. The loop is given as its
        `while` and the computation that stands in.
        """
        loop = self._loop_around(inside)
        if loop is None or not _all(self._fixed(inside)[name]):
            return None
        return loop

    def _loop_around(self, inside: Computation) -> Placed | None:
        callers = self.callers.get(inside.name, ())
        if len(callers) != 1:  # called from several places: not followed
            return None
        caller, call = callers[0]
        if call.opcode == "while":
            return (caller, call) if inside.name in call.called["body"] else None
        return self._loop_around(caller)

    def _fixed(self, inside: Computation) -> dict[str, "Fixed"]:
        """For each value below a loop, whether all iterations have the same."""
        if inside.name not in self._known:
            known: dict[str, Fixed] = {}
            for value in inside.instructions:  # operands always stand before their users
                known[value.name] = self._fixed_value(inside, value, known)
            self._known[inside.name] = known
        return self._known[inside.name]

    def _fixed_value(self, inside: Computation, value: Instruction, known) -> "Fixed":
        operands = [known[name] for name in value.operands]
        if value.opcode == "parameter":
            caller, call = self.callers[inside.name][0]
            if call.opcode == "while":
                parts = range(len(value.shape.parts))
                return bool(parts) and tuple(passes_through(inside, i) for i in parts)
            return self._fixed(caller)[argument(call, inside.name, value)]
        if value.opcode == "tuple":
            return tuple(operands)
        if value.opcode == "get-tuple-element" and isinstance(operands[0], tuple):
            return operands[0][int(value.attributes["index"])]
        if value.opcode in PASSED_ON:
            return operands[0]
        effects = value.opcode in _EFFECTS or "custom_call_has_side_effect" in value.attributes
        return not effects and all(map(_all, operands))


Fixed = bool | tuple
"""Whether a value is fixed; for a tuple, its elements'."""


def _all(fixed: Fixed) -> bool:
    return all(map(_all, fixed)) if isinstance(fixed, tuple) else fixed


def passes_through(body: Computation, index: int) -> bool:
    """Whether a loop's body hands element `index` of its tuple to the next iteration as it is."""
    if body.root.opcode != "tuple" or index >= len(body.root.operands):
        return False
    value = body.by_name[body.root.operands[index]]
    while value.opcode in PASSED_ON:
        value = body.by_name[value.operands[0]]
    return (
        value.opcode == "get-tuple-element"
        and int(value.attributes["index"]) == index
        and body.by_name[value.operands[0]].opcode == "parameter"
    )


def argument(call: Instruction, computation: str, parameter: Instruction) -> str:
    """The operand of a call that a parameter of the called computation stands for."""
    if call.opcode != "conditional":
        return call.operands[int(parameter.literal)]
    names = call.called.get("branch_computations") or (
        call.called["true_computation"] + call.called["false_computation"]
    )
    return call.operands[1 + names.index(computation)]


@dataclass(frozen=True)
class _Search:
    """The way of one start's value to its done; `seen` are the values that were followed."""

    flow: Flow
    seen: set[tuple[str, str, tuple[int, ...]]]

    def from_value(
        self,
        inside: Computation,
        name: str,
        path: tuple[int, ...],
        since: int,
        leave: bool = True,
    ) -> tuple[Placed, ...] | None:
        """What is issued from position `since` on until the done of element `path` of a value.

        `leave`: whether the value may go on through the computation's root.
        """
        if (inside.name, name, path) in self.seen:
            return None
        self.seen.add((inside.name, name, path))
        for user in inside.users.get(name, ()):
            found = self._into_user(inside, name, path, since, user, leave)
            if found is not None:
                return found
        if name == inside.root.name and leave:
            return self._through_root(inside, path, since)
        return None

    def _into_user(self, inside, name, path, since, user, leave) -> tuple[Placed, ...] | None:
        before = inside.instructions[since : self.flow.place(inside, user.name)]
        passed = tuple((inside, instruction) for instruction in before)
        if user.opcode.endswith("-done"):
            return passed if not path else None
        if user.opcode in ("while", "call"):
            found = self._into_call(name, path, user)
            if found is not None:
                return passed + found
        for onward in _onward(user, name, path):
            found = self.from_value(inside, user.name, onward, since, leave)
            if found is not None:
                return found
        return None

    def _into_call(self, name: str, path, call: Instruction) -> tuple[Placed, ...] | None:
        key = "body" if call.opcode == "while" else "to_apply"
        below = self.flow.program.computations[call.called[key][0]]
        parameter = below.parameters[call.operands.index(name)]
        return self.from_value(below, parameter.name, path, 0, leave=False)

    def _through_root(self, inside: Computation, path, since: int) -> tuple[Placed, ...] | None:
        rest = tuple((inside, instruction) for instruction in inside.instructions[since:])
        for caller, call in self.flow.callers.get(inside.name, ()):
            found = None
            if call.opcode == "while":
                found = self.from_value(inside, inside.parameters[0].name, path, 0)
            if found is None:
                after = self.flow.place(caller, call.name) + 1
                found = self.from_value(caller, call.name, path, after)
            if found is not None:
                return rest + found
        return None


def _onward(user: Instruction, name: str, path: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Where in the user's result the value is; a part of a start's tuple counts as the start."""
    if user.opcode == "tuple":
        return [(i, *path) for i, operand in enumerate(user.operands) if operand == name]
    if user.opcode == "get-tuple-element":
        index = int(user.attributes["index"])
        return [path[1:]] if not path or path[0] == index else []
    same = user.opcode == "while" or user.opcode in PASSED_ON or user.opcode.endswith("-update")
    return [path] if same else []
