"""Whether XLA sends a value in a wider type than the program asked for.

The one idea: XLA:CPU has no bf16 arithmetic, so it turns a bf16 collective into `convert to f32,
collective, convert back`. The converts stay next to the collective (inside fusions), and a promoted
reduction calls a computation named `..._promoted`; both are read here. GPUs send bf16 as it is.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxpar.cluster.hlo_text import Computation, Instruction, Program, dtype_bits

_SAME_VALUE = ("bitcast", "copy", "reshape", "transpose", "slice")
# How JAX names the converts of the user's program; XLA renames those on a shard_map's arguments.
_USERS_CONVERTS = ("convert_element_type", "shard_map")
_REDUCTIONS = ("all-reduce", "reduce-scatter")


def promoted_from(
    program: Program, computation: Computation, instruction: Instruction, op: str, index: int
) -> str | None:
    """The narrower type that operand `index` of a collective had before XLA widened it, or None.

    A moved value (gather, permute, all-to-all) counts as widened when the convert right before it
    was not written by the user (JAX names those), or the converts before and after it agree and the
    one after was not. A reduction counts when XLA's name for its computation
    says so, or, in a combined one, when the converts before and after agree.
    """
    operand = computation.by_name.get(instruction.operands[index])
    if operand is None or operand.shape.dtype not in ("f32", "f64", "s32", "u32"):
        return None
    before = convert_before(program, computation, operand)
    element = index if instruction.shape.dtype == "tuple" else None
    after = only(converts_after(program, computation, instruction, element))
    agreed = before.dtype if before.dtype == after.dtype else None
    if op not in _REDUCTIONS:
        return agreed if agreed and after.by_xla else before.dtype if before.by_xla else None
    several = len(instruction.operands) > 1
    if "_promoted" in instruction.attributes.get("to_apply", ""):
        known = after.dtype or before.dtype
        return known or (None if several else _only_narrow_float(program))
    return agreed if several else None


class _Convert(NamedTuple):
    """The narrower type of a convert next to a collective (None: no such convert)."""

    dtype: str | None = None
    by_xla: bool = False


def convert_before(
    program: Program, inside: Computation, value: Instruction, element: int = 0
) -> _Convert:
    while True:
        if value.opcode == "convert":
            source = inside.by_name[value.operands[0]]
            return _narrowing(value, source.shape.dtype, value.shape.dtype)
        if value.opcode == "get-tuple-element":
            element = int(value.attributes["index"])
            value = inside.by_name[value.operands[0]]
        elif value.opcode == "tuple":
            value = inside.by_name[value.operands[element]]
        elif value.opcode in _SAME_VALUE:
            value = inside.by_name[value.operands[0]]
        elif value.opcode in ("fusion", "call") and value.called:
            (callee,) = next(iter(value.called.values()))
            inside = program.computations[callee]
            value = inside.root
        else:
            return _Convert()


def converts_after(
    program: Program, inside: Computation, value: Instruction, element: int | None
) -> Iterator[_Convert]:
    """The convert that each reader starts with; `element` picks one result of a tuple."""
    for user in inside.users.get(value.name, ()):
        if user.opcode == "convert":
            yield _narrowing(user, user.shape.dtype, value.shape.dtype)
        elif user.opcode == "get-tuple-element":
            if element is None or int(user.attributes["index"]) == element:
                yield from converts_after(program, inside, user, None)
        elif user.opcode.endswith("-done"):
            several = user.shape.dtype == "tuple"
            yield from converts_after(program, inside, user, element if several else None)
        elif user.opcode in ("fusion", "call") and user.called:
            (callee,) = next(iter(user.called.values()))
            below = program.computations[callee]
            for place, operand in enumerate(user.operands):
                if operand == value.name:
                    yield from converts_after(program, below, below.parameters[place], None)
        elif user.opcode in (*_SAME_VALUE, "concatenate"):
            yield from converts_after(program, inside, user, None)
        else:
            yield _Convert()


def _narrowing(convert: Instruction, narrow: str, wide: str) -> _Convert:
    if dtype_bits(narrow) >= dtype_bits(wide):
        return _Convert()
    return _Convert(narrow, not convert.op_name.endswith(_USERS_CONVERTS))


def only(converts: Iterator[_Convert]) -> _Convert:
    found = list(converts)
    if len({convert.dtype for convert in found}) != 1:
        return _Convert()
    return _Convert(found[0].dtype, any(convert.by_xla for convert in found))


def _only_narrow_float(program: Program) -> str:
    """The 16-bit or 8-bit float type used in the program when it is one, else `narrower`."""
    found = {
        dtype
        for computation in program.computations.values()
        for instruction in computation.instructions
        for dtype in (leaf.dtype for leaf in instruction.shape.leaves)
        if dtype in ("bf16", "f16") or dtype.startswith("f8")
    }
    return found.pop() if len(found) == 1 else "narrower"
