"""Optimized HLO text as a tree of plain records.

The one idea: an HLO line is `name = shape opcode(operands), key=value, ...`, and everything in it
nests by brackets and quotes. So one splitter that respects both is enough to take any line apart,
whatever layouts, shardings, comments or back-end settings it carries; nothing is interpreted here.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_COMMENT_OR_QUOTE = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/')
_HEADER = re.compile(r"^(ENTRY\s+)?%?([^\s(=,]+)\s*(?:\(.*->.*)?\{$")
_LINE = re.compile(r"^\s+(ROOT\s+)?%?([^\s=]+) = ")
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_DTYPE_BITS = re.compile(r"[a-z]+(\d+)")
_CALLS = ("calls", "to_apply", "body", "condition", "true_computation", "false_computation")
_CALL_LISTS = ("branch_computations", "called_computations")


@dataclass(frozen=True)
class Shape:
    """The type of a value: an array (`dtype`, `dims`) or, with `dtype="tuple"`, its `parts`."""

    dtype: str
    dims: tuple[int, ...] = ()
    parts: tuple["Shape", ...] = ()

    @property
    def leaves(self) -> tuple["Shape", ...]:
        """The arrays in it, in order, tuples taken apart."""
        if self.dtype != "tuple":
            return (self,)
        return tuple(leaf for part in self.parts for leaf in part.leaves)

    @property
    def bytes(self) -> int:
        """Size in bytes; four-bit types are packed, tokens take nothing."""
        if self.dtype == "tuple":
            return sum(part.bytes for part in self.parts)
        return (math.prod(self.dims) * dtype_bits(self.dtype) + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `attributes` holds every `key=value` after the operands, as text.

    `literal` is what stands in the parentheses of a `constant` or `parameter`.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    attributes: Mapping[str, str]
    literal: str = ""

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations it calls, by the attribute that names them."""
        found = {key: (_bare(self.attributes[key]),) for key in _CALLS if key in self.attributes}
        for key in _CALL_LISTS:
            if key in self.attributes:
                names = split(self.attributes[key].strip()[1:-1])
                found[key] = tuple(_bare(name) for name in names if name)
        return found

    @property
    def op_name(self) -> str:
        """Where JAX made it, such as `jit(step)/transpose(jvp(block))/dot_general`; may be ""."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found.group(1) if found else ""


@dataclass(frozen=True)
class Computation:
    """A named list of instructions; `root` is its result."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """For each instruction name, the instructions that read it."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters in the order of the call's operands."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal)))


@dataclass(frozen=True)
class Program:
    """A compiled module: its computations, the name of the entry, and the header's settings."""

    name: str
    entry: str
    computations: Mapping[str, Computation] = field(repr=False)
    header: Mapping[str, str] = field(repr=False)

    @property
    def num_devices(self) -> int | None:
        """Devices that the header says the program runs on, or None where it says nothing."""
        if "num_partitions" not in self.header and "replica_count" not in self.header:
            return None
        return int(self.header.get("num_partitions", 1)) * int(self.header.get("replica_count", 1))


def dtype_bits(dtype: str) -> int:
    """Bits of one element of an HLO type: 16 for `bf16`, 8 for `pred`, 4 for `s4`."""
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    found = _DTYPE_BITS.match(dtype)
    if found is None:
        raise ValueError(
            f"HLO type {dtype!r} has no known size; known are pred, token, opaque and types that "
            "carry their bits in the name, such as bf16, f8e4m3fn or s4; check that the text is "
            "the unchanged result of compiled.as_text()"
        )
    return int(found.group(1))


def split(text: str) -> list[str]:
    """Split at the commas that stand outside brackets and quotes.

    >>> split('a{1,0}, b="x,y", c=[2,4]<=[8]')
    ['a{1,0}', 'b="x,y"', 'c=[2,4]<=[8]']
    """
    parts, depth, start = [], 0, 0
    for mark in _MARKS.finditer(text):
        character = mark.group()
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start : mark.start()].strip())
            start = mark.end()
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`; -1 when it is never closed."""
    depth = 0
    for mark in _MARKS.finditer(text, start):
        if mark.group() in "([{":
            depth += 1
        elif mark.group() in ")]}":
            depth -= 1
            if depth == 0:
                return mark.start()
    return -1


def parse_shape(text: str) -> Shape:
    """Read a shape, with or without layout.

    >>> parse_shape("(f32[8,2]{1,0:T(8,128)}, token[])").bytes
    64
    """
    text = text.strip()
    if text.startswith("("):
        return Shape("tuple", (), tuple(map(parse_shape, split(text[1 : closing(text, 0)]))))
    found = _SHAPE.match(text)
    if found is None:
        raise _unreadable("shape", text, "dtype[dims], such as bf16[8,128]{1,0}")
    dims = tuple(int(d.strip().removeprefix("<=")) for d in found.group(2).split(",") if d.strip())
    return Shape(found.group(1), dims)


def parse(text: str) -> Program:
    """Read the text of a compiled program, as `compiled.as_text()` gives it on CPU and on GPU.

    Raises ValueError for text that is not an HLO module or has a line of another form.

    >>> program = parse('''HloModule two
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %y = f32[4]{0} add(f32[4]{0} %x, %x), metadata={op_name="jit(f)/add"}
    ... }''')
    >>> root = program.computations[program.entry].root
    >>> root.opcode, root.operands, root.shape.bytes, root.op_name
    ('add', ('x', 'x'), 16, 'jit(f)/add')
    """
    name, header, entry = "", {}, ""
    computations: dict[str, Computation] = {}
    for kind, title, lines in _blocks(text):
        if kind == "module":
            parts = split(title.removeprefix("HloModule "))
            name, header = parts[0], _attributes(parts[1:])
            continue
        computations[title] = _computation(title, lines)
        entry = title if kind == "entry" else entry
    if not entry:
        raise ValueError(
            "the text has no ENTRY computation; an HLO module has exactly one; give the result of "
            "jit(f).lower(...).compile().as_text()"
        )
    return Program(name, entry, computations, header)


def instruction_lines(text: str) -> int:
    """Number of HLO instructions in the text, all computations together; needs no parsing.

    >>> instruction_lines("ENTRY %e (x: f32[]) -> f32[] {\\n  ROOT %x = f32[] parameter(0)\\n}")
    1
    """
    return sum(1 for line in text.splitlines() if _LINE.match(line))


def _blocks(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield ("module", header, []) and ("entry" or "computation", name, lines)."""
    kind, title, lines = "", "", []
    for line in text.splitlines():
        if kind:
            if line.startswith("}"):
                yield kind, title, lines
                kind = ""
            elif lines and not _LINE.match(line) and closing(f"({lines[-1]})", 0) < 0:
                lines[-1] += " " + line.strip()  # a literal that was printed over several lines
            elif line.strip():
                lines.append(line)
        elif line.startswith("HloModule "):
            yield "module", line, []
        elif line.endswith("{") and (found := _HEADER.match(line.rstrip())):
            kind, title, lines = "entry" if found.group(1) else "computation", found.group(2), []


def _computation(name: str, lines: list[str]) -> Computation:
    if not lines:
        raise _unreadable("computation", name, "at least one instruction between its braces")
    read = [_instruction(line) for line in lines]
    instructions = tuple(instruction for instruction, _ in read)
    root = next((instruction for instruction, is_root in read if is_root), instructions[-1])
    return Computation(name, instructions, root)


def _instruction(line: str) -> tuple[Instruction, bool]:
    """Take `ROOT %name = shape opcode(operands), key=value, ...` apart; also say whether ROOT."""
    if "/*" in line:
        line = _COMMENT_OR_QUOTE.sub(lambda m: m.group() if m.group()[0] == '"' else "", line)
    start = _LINE.match(line)
    if start is None:
        raise _unreadable("line", line, "name = shape opcode(operands), key=value, ...")
    rest = line[start.end() :]
    end = closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opened = rest.find("(", end)
    closed = closing(rest, opened) if end > 0 and opened > 0 else -1
    if closed < 0:
        raise _unreadable("line", line, "name = shape opcode(operands), key=value, ...")
    opcode, inside = rest[end:opened].strip(), rest[opened + 1 : closed]
    literal = inside.strip() if opcode in ("constant", "parameter") else ""
    names = () if literal or opcode == "constant" else tuple(map(_bare, split(inside)))
    shape, attributes = parse_shape(rest[:end]), _attributes(split(rest[closed + 1 :]))
    return Instruction(start[2], opcode, shape, names, attributes, literal), bool(start[1])


def _attributes(parts: list[str]) -> dict[str, str]:
    """`key=value` texts as a dict; a mesh with a device order stays one replica_groups value."""
    found: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key == "device_ids" and found.get("replica_groups", "").startswith("mesh["):
            found["replica_groups"] += ", " + part
        elif equals:
            found[key.strip()] = value.strip()
    return found


def _bare(text: str) -> str:
    """The name in `f32[2]{0} %name`, `%name` or `name`."""
    return text.split()[-1].lstrip("%") if text else ""


def _unreadable(what: str, text: str, rule: str) -> ValueError:
    return ValueError(
        f"cannot read the HLO {what} {text.strip()[:160]!r}; expected {rule}; give the unchanged "
        "result of compiled.as_text()"
    )
