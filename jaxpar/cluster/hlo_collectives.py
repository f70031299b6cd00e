"""Every collective of a compiled program: which mesh axes, how often a step, how many bytes.

The one idea: the *payload* of a collective is the whole buffer that its group has in common, per
device: the gathered result, the input of a reduce-scatter, the buffer that is reduced, exchanged or
passed on. What a device really sends follows from it and the group size, as on a ring.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from jaxpar.cluster.hlo_groups import Groups, axes_of_groups, axes_of_pairs, parse_groups
from jaxpar.cluster.hlo_promotion import promoted_from
from jaxpar.cluster.hlo_text import Instruction, Program, dtype_bits, parse
from jaxpar.cluster.hlo_walk import BranchShare, Count, Visit, walk

UNKNOWN_AXES = ("?",)

_OPS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast", "send",
)  # fmt: skip
_LIKE_A_COLLECTIVE = re.compile(r"^(all-|ragged-all|reduce-scatter|collective-)")
_PAIRED = ("collective-permute", "send")


@dataclass(frozen=True)
class Buffer:
    """One array of a collective, with the type the program asked for where XLA widened it."""

    dtype: str
    bytes: int
    promoted_from: str | None = None

    @property
    def asked_bytes(self) -> int:
        """Bytes in the type that the program asked for; `bytes` where XLA kept it."""
        if self.promoted_from is None or self.promoted_from == "narrower":
            return self.bytes
        return self.bytes * dtype_bits(self.promoted_from) // dtype_bits(self.dtype)


@dataclass(frozen=True)
class Collective:
    """One collective instruction in one place of the program.

    Attributes:
      op: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `ragged-all-to-all`,
        `collective-permute`, `collective-broadcast` or `send`, whether synchronous or not.
      axes: mesh axes it runs over, outermost first; () when every device is alone in its group, and
        ("?",) when the groups are no product of mesh axes (`warning` then says which groups).
      count: executions per step, loops multiplied out; None when a loop's trip count is unknown.
      buffers: the arrays it carries (a combined collective has several).
      groups: device numbers of each group; for a permute, (source, target) pairs.
      in_conditional: whether it stands in a branch; `count` holds the share given for that branch.
      computation, name: where it is in the HLO text.
      op_name: where JAX made it.
      asynchronous: whether it is a start/done pair.
      warning: what could not be read, "" when everything could.
    """

    op: str
    axes: tuple[str, ...]
    count: Count
    buffers: tuple[Buffer, ...]
    groups: Groups = field(repr=False)
    in_conditional: bool
    computation: str
    name: str
    op_name: str = field(default="", repr=False)
    asynchronous: bool = False
    warning: str = ""

    @property
    def dtype(self) -> str:
        """The type on the wire; several are joined, as in `bf16+f32`."""
        return "+".join(sorted({buffer.dtype for buffer in self.buffers}))

    @property
    def promoted_from(self) -> str | None:
        """The narrower type that the program asked for and XLA widened, or None."""
        found = {b.promoted_from for b in self.buffers if b.promoted_from is not None}
        return "+".join(sorted(found)) or None

    @property
    def bytes(self) -> int:
        """Payload of one execution, in bytes per device.

        The full result of a gather, the full input of a reduce-scatter, the buffer of any other; of
        `ragged-all-to-all` the send buffer, an upper bound.
        """
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def asked_bytes(self) -> int:
        """`bytes` in the types that the program asked for, comparable between CPU and GPU."""
        return sum(buffer.asked_bytes for buffer in self.buffers)

    @property
    def total_bytes(self) -> Count:
        """Payload per step, `count * bytes`; None when the count is unknown."""
        return None if self.count is None else self.count * self.bytes

    @property
    def group_size(self) -> int:
        """Devices in a group (the largest one); 2 for a permute, sender and receiver."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in one execution, on a ring of n devices.

        payload (n-1)/n for gather, scatter and all-to-all; twice that for an all-reduce; the whole
        payload for a broadcast, and for a permute with any pair of two devices. Rounded up.
        """
        if self.op in _PAIRED:
            return self.bytes if any(len(set(pair)) > 1 for pair in self.groups) else 0
        n = self.group_size
        if self.op == "collective-broadcast":
            return self.bytes if n > 1 else 0
        passes = 2 if self.op == "all-reduce" else 1
        return -(-passes * self.bytes * (n - 1) // n)

    @property
    def total_wire_bytes(self) -> Count:
        """Bytes that a device sends per step; None when the count is unknown."""
        return None if self.count is None else self.count * self.wire_bytes


class Traffic(NamedTuple):
    """Sums over collectives, per device and step; None where a loop's trip count is unknown."""

    count: Count
    payload_bytes: Count
    wire_bytes: Count


def collectives(
    program: str | Program,
    mesh_axes: Mapping[str, int],
    *,
    branch_share: BranchShare = 1.0,
    trip_counts: Mapping[str, int] | None = None,
) -> list[Collective]:
    """List the collectives of a compiled program, in the order of the text.

    Args:
      program: `compiled.as_text()`, or what `parse` made of it.
      mesh_axes: name -> size of the mesh's axes, outermost first; the mesh must be the one that the
        program was compiled for.
      branch_share, trip_counts: as in `walk`.

    Raises ValueError when the mesh does not have the program's number of devices. What cannot be
    mapped is not left out: it has `axes=("?",)` or `count=None`, and a `warning`.

    >>> text = '''HloModule sum, num_partitions=4
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %y = f32[8]{0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add
    ... }'''
    >>> (found,) = collectives(text, {"data": 2, "tensor": 2})
    >>> found.op, found.axes, found.count, found.bytes, found.wire_bytes
    ('all-reduce', ('tensor',), 1, 32, 32)
    """
    program = parse(program) if isinstance(program, str) else program
    devices = math.prod(mesh_axes.values())
    if program.num_devices not in (None, devices):
        raise ValueError(
            f"mesh_axes={dict(mesh_axes)} has {devices} devices, but the program runs on "
            f"{program.num_devices}; give the axes of the mesh that it was compiled for"
        )
    found = []
    for visit in walk(program, branch_share=branch_share, trip_counts=trip_counts):
        op = _operation(visit.instruction)
        if op is not None:
            found.append(_collective(program, visit, op, tuple(mesh_axes.items())))
    return found


def by_axis(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], Traffic]:
    """Sum collectives per (operation, axes): executions, payload bytes and bytes sent, per step.

    >>> by_axis([])
    {}
    """
    sums: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for item in found:
        before = sums.get((item.op, item.axes), Traffic(0, 0, 0))
        new = (item.count, item.total_bytes, item.total_wire_bytes)
        parts = zip(before, new, strict=True)
        total = (None if a is None or b is None else a + b for a, b in parts)
        sums[item.op, item.axes] = Traffic(*total)
    return sums


def _operation(instruction: Instruction) -> str | None:
    """The collective that an instruction begins, or None; its done and update begin none."""
    opcode = instruction.opcode
    if opcode == "send":
        return "send" if instruction.attributes.get("is_host_transfer") != "true" else None
    if opcode.endswith(("-done", "-update")):
        return None
    name = opcode.removesuffix("-start")
    return name if name in _OPS or _LIKE_A_COLLECTIVE.match(name) else None


def _collective(
    program: Program, visit: Visit, op: str, mesh_axes: tuple[tuple[str, int], ...]
) -> Collective:
    instruction = visit.instruction
    groups, axes, warning = _placement(op, _groups_text(op, instruction), mesh_axes)
    warnings = [warning] if warning else []
    if op not in _OPS:
        axes = UNKNOWN_AXES
        warnings.append(f"{op} is not a collective known here; its bytes are its operands'")
    if "slice_sizes" in instruction.attributes:
        warnings.append("it moves slices in place; its bytes are the whole buffer's")
    warnings += [f"the trip count of loop {loop} is not known" for loop in visit.unknown_loops]
    return Collective(
        op=op,
        axes=axes,
        count=visit.count,
        buffers=_buffers(program, visit, op),
        groups=groups,
        in_conditional=visit.in_conditional,
        computation=visit.computation.name,
        name=instruction.name,
        op_name=instruction.op_name,
        asynchronous=visit.asynchronous or instruction.opcode.endswith("-start") or op == "send",
        warning="; ".join(warnings),
    )


def _groups_text(op: str, instruction: Instruction) -> str:
    attributes = instruction.attributes
    if op == "send":
        pairs = re.search(
            r'_xla_send_recv_source_target_pairs="?(\{\{[^"]*?\}\})',
            attributes.get("frontend_attributes", ""),
        )
        return pairs.group(1) if pairs else attributes.get("source_target_pairs", "no pairs")
    return attributes.get("source_target_pairs" if op in _PAIRED else "replica_groups", "{}")


@lru_cache(maxsize=4096)
def _placement(
    op: str, text: str, mesh_axes: tuple[tuple[str, int], ...]
) -> tuple[Groups, tuple[str, ...], str]:
    """Groups, axes and a warning; texts repeat a thousand times in a program, so this is cached."""
    sizes = dict(mesh_axes)
    if op in _PAIRED and text == "{}":
        return (), (), ""
    try:
        groups = parse_groups(text, math.prod(sizes.values()))
    except ValueError as error:
        return (), UNKNOWN_AXES, str(error)
    axes = (axes_of_pairs if op in _PAIRED else axes_of_groups)(groups, sizes)
    if axes is None:
        return groups, UNKNOWN_AXES, f"groups {text[:120]} are no product of the axes of {sizes}"
    return groups, axes, ""


def _buffers(program: Program, visit: Visit, op: str) -> tuple[Buffer, ...]:
    instruction, inside = visit.instruction, visit.computation
    operands = [inside.by_name[name].shape for name in instruction.operands]
    if op in ("ragged-all-to-all", "send") or "slice_sizes" in instruction.attributes:
        operands = operands[:1]  # the others are offsets, sizes, tokens or the place to write to
    shapes = operands
    if op == "all-gather":
        shapes, n = instruction.shape.leaves, len(operands)
        if instruction.opcode.endswith("-start"):  # its result is (operands, results)
            shapes = shapes[n : 2 * n]
    found = []
    for index, shape in enumerate(shapes):
        narrow = promoted_from(program, inside, instruction, op, index)
        found += [Buffer(leaf.dtype, leaf.bytes, narrow) for leaf in shape.leaves]
    return tuple(found)
