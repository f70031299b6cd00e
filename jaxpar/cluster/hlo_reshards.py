"""Collectives that XLA's partitioner put into a program to move an array to another sharding.

The one idea: JAX names a collective that the program asks for after its primitive (`psum`,
`all_gather`, ...), the partitioner names its own after the operation that needed them, or not at
all. How hard it had to work shows in what stands around one: a slice that throws most of a gathered
array away again, or another such collective right before it.
"""

import re
from collections.abc import Iterator

from jaxpar.cluster.hlo_collectives import Collective
from jaxpar.cluster.hlo_flow import PASSED_ON, Flow
from jaxpar.cluster.hlo_text import Computation, Instruction, Shape

MOVES = (
    "all-gather", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip
"""Collectives that move values and add nothing up."""

_PRIMITIVES = re.compile(
    r"^(unreduced_)?(psum|pmax|pmin|ppermute|psend|precv|pbroadcast|all_gather|reduce_scatter"
    r"|all_to_all|ragged_all_to_all)(_\w+)?$"
)
_REARRANGED = (
    "bitcast", "broadcast", "concatenate", "constant", "convert", "copy", "dynamic-slice",
    "get-tuple-element", "iota", "pad", "parameter", "reshape", "reverse", "slice", "transpose",
    "tuple",
)  # fmt: skip


def by_partitioner(instruction: Instruction, item: Collective) -> bool:
    """Whether a collective that moves values was put in by the partitioner.

    Several collectives that XLA combined have no name, or one joined of theirs, such as
    `(jvp()/all_gather:all_gather)`; those without are not taken for the partitioner's.
    """
    if item.op not in MOVES:
        return False
    if 'is_spmd_generated="true"' in instruction.attributes.get("frontend_attributes", ""):
        return True
    if not item.op_name and len(instruction.operands) > 1:
        return False
    names = [name for name in re.split("[:()]", item.op_name.rsplit("/", 1)[-1]) if name]
    return not (names and all(_PRIMITIVES.match(name) for name in names))


def kept_part(flow: Flow, inside: Computation, collective: Instruction) -> int | None:
    """Bytes that a device keeps of a gathered array when all that it does is to cut its part out.

    None when the array is used in any other way.
    """
    placed = flow.start_of(inside, collective)
    if placed is None:
        return _kept(flow, inside, collective)
    inside, value = placed
    done = [user for user in inside.users.get(value.name, ()) if user.opcode.endswith("-done")]
    return _kept(flow, inside, done[0]) if len(done) == 1 else None


def collectives_before(
    flow: Flow, inside: Computation, collective: Instruction
) -> Iterator[Instruction]:
    """The collectives whose results a collective reads with nothing computed in between."""
    inside, value = flow.start_of(inside, collective) or (inside, collective)
    wanted, seen = list(value.operands), set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        source = inside.by_name[name]
        opcode = source.opcode.removesuffix("-done").removesuffix("-start")
        if opcode in MOVES:
            yield source
        elif opcode == "async":
            yield from _wrapped(flow, source)
        elif _only_rearranges(flow, source):
            wanted += source.operands


def _wrapped(flow: Flow, wrapper: Instruction) -> Iterator[Instruction]:
    for names in wrapper.called.values():
        for instruction in flow.program.computations[names[0]].instructions:
            if instruction.opcode in MOVES:
                yield instruction


def _only_rearranges(flow: Flow, value: Instruction) -> bool:
    if value.opcode != "fusion":
        return value.opcode in _REARRANGED
    (callee,) = next(iter(value.called.values()))
    inside = flow.program.computations[callee]
    return all(
        instruction.opcode in _REARRANGED
        for instruction in inside.instructions
        if not _is_single(instruction.shape)
    )


def _kept(flow: Flow, inside: Computation, value: Instruction) -> int | None:
    total = 0
    for user in inside.users.get(value.name, ()):
        if user.opcode in (*PASSED_ON, "get-tuple-element"):
            part = _kept(flow, inside, user)
        elif user.opcode == "fusion":
            part = _kept_by_fusion(flow, inside, value, user)
        elif user.opcode == "dynamic-slice" and _reads_partition(inside, user.operands[1:]):
            part = user.shape.bytes
        else:
            part = None
        if part is None:
            return None
        total += part
    return total or None


def _kept_by_fusion(flow: Flow, inside: Computation, value: Instruction, fusion: Instruction):
    """The same for what a fusion does with its parameter."""
    (callee,) = next(iter(fusion.called.values()))
    below = flow.program.computations[callee]
    others = [name for name in fusion.operands if name != value.name]
    if not _reads_partition(inside, others) and not _has_partition(below.instructions):
        return None
    total = 0
    for place, operand in enumerate(fusion.operands):
        wanted = [below.parameters[place]] if operand == value.name else []
        while wanted:
            for user in below.users.get(wanted.pop().name, ()):
                if user.opcode in (*PASSED_ON, "reshape", "transpose"):
                    wanted.append(user)
                elif user.opcode == "dynamic-slice":
                    total += user.shape.bytes
                else:
                    return None
    return total or None


def _reads_partition(inside: Computation, names) -> bool:
    """Whether any of these numbers is worked out from the device's own number."""
    wanted, seen = list(names), set()
    while wanted:
        name = wanted.pop()
        if name not in seen and inside.by_name[name].shape.dtype[0] in "su":
            seen.add(name)
            wanted += inside.by_name[name].operands
    return _has_partition(inside.by_name[name] for name in seen)


def _has_partition(instructions) -> bool:
    return any(instruction.opcode == "partition-id" for instruction in instructions)


def _is_single(shape: Shape) -> bool:
    return shape.dtype != "tuple" and all(dim == 1 for dim in shape.dims)
