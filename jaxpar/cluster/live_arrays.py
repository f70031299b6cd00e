"""The memory of a compiled program, and where the arrays that take it come from.

The one idea: XLA names a buffer after the instruction that makes it; where that has no place in the
user's program, what it was made from has one: a gathered parameter is traced back to the parameter.
"""

import re
from collections.abc import Iterable

from jaxpar.cluster import hlo
from jaxpar.cluster.live import Value
from jaxpar.cluster.report import Array, Memory
from jaxpar.cluster.target import Target

ARRAYS = 24
"""Arrays of the peak that a report keeps."""

_ONE_SOURCE = ("all-gather", "bitcast", "convert", "copy", "fusion", "reshape", "transpose")


def memory(stats, target: Target, program: hlo.Program, values: Iterable[Value]) -> Memory:
    """`compiled.memory_analysis()`, with the arrays of the peak."""
    sizes = {what: getattr(stats, f"{what}_size_in_bytes") for what in
             ("argument", "output", "temp", "alias")}  # fmt: skip
    host = {what: getattr(stats, f"host_{what}_size_in_bytes") for what in sizes}
    return Memory(
        arguments=sizes["argument"],
        outputs=sizes["output"],
        temporaries=sizes["temp"],
        aliased=sizes["alias"],
        peak=_sum(sizes),
        device=None if target.is_cpu else target.chip.memory_bytes,
        arrays=largest(program, values),
        host=_sum(host),
    )


def _sum(sizes: dict[str, int]) -> int:
    return sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]


def largest(program: hlo.Program, values: Iterable[Value]) -> tuple[Array, ...]:
    """Arguments and the temporaries of the peak, largest first."""
    entry = program.computations[program.entry]
    found = [
        Array("argument", i.op_name or i.name, _shape(i.shape), i.shape.bytes)
        for i in entry.parameters
    ]
    known = origins(program)
    for value in values:
        name = re.sub(r"\{.*$", "", value.name)
        found.append(Array("temporary", known.get(name) or name, value.shape, value.bytes))
    return tuple(sorted(found, key=lambda a: -a.bytes)[:ARRAYS])


def origins(program: hlo.Program) -> dict[str, str]:
    """Instruction -> where JAX made it; what has no such name has that of what it is made from.

    For a loop's tuple that is the loop, for a fusion a part of it, for a moved value its source.
    """
    found: dict[str, str] = {}
    for computation in program.computations.values():
        for instruction in computation.instructions:
            below = [name for names in instruction.called.values() for name in names]
            name = instruction.op_name or _inside(program, instruction)
            if not name and (source := _source(computation, instruction)):
                name = found.get(source, "")
            if name:
                found.setdefault(instruction.name, name)
            if instruction.opcode == "while":
                for parameter in (p for b in below for p in program.computations[b].parameters):
                    found[parameter.name] = name
    return found


def _inside(program: hlo.Program, instruction: hlo.Instruction) -> str:
    """The last named instruction of a fusion."""
    if instruction.opcode != "fusion":
        return ""
    (callee,) = next(iter(instruction.called.values()))
    parts = reversed(program.computations[callee].instructions)
    return next((i.op_name for i in parts if i.op_name), "")


def _source(inside: hlo.Computation, instruction: hlo.Instruction) -> str | None:
    """The one value that an instruction moves or rearranges; of several combined, its own."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "get-tuple-element":
        done = inside.by_name[operands[0]]
        start = inside.by_name[done.operands[0]] if done.opcode.endswith("-done") else done
        place = int(instruction.attributes["index"])
        moves = start.opcode.removesuffix("-start") in _ONE_SOURCE and place < len(start.operands)
        return start.operands[place] if moves else None
    plain = opcode.removesuffix("-start").removesuffix("-done")
    return operands[0] if plain in _ONE_SOURCE and len(operands) == 1 else None


def _shape(shape: hlo.Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
