"""What is different between two compiled programs.

The one idea: two reports have the same fields, so a change of a setting is the list of the numbers
that it changed.
"""

import dataclasses

from jaxpar.cluster.report import Report, Sums, number
from jaxpar.cluster.report_text import columns, operations, size, times

_MEMORY = ("arguments", "outputs", "temporaries", "aliased", "peak", "host")


@dataclasses.dataclass(frozen=True)
class Diff:
    """The numbers that differ from `before` to `after`, each as a pair; true when there are any.

    `print(diff)` shows them as a table.
    """

    before: Report
    after: Report

    @property
    def memory(self) -> dict[str, tuple[int, int]]:
        """Field of `Memory` -> bytes."""
        pair = self.before.memory, self.after.memory
        found = {name: tuple(getattr(memory, name) for memory in pair) for name in _MEMORY}
        return {name: (a, b) for name, (a, b) in found.items() if a != b}

    @property
    def flops(self) -> tuple | None:
        """Operations, or None where they are the same."""
        pair = self.before.flops, self.after.flops
        return None if pair[0] == pair[1] else pair

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[Sums, Sums]]:
        """(operation, axis) -> executions and bytes of a step."""
        return _changed(self.before.by_axis, self.after.by_axis, Sums(0, 0, 0))

    @property
    def exposed(self) -> dict[tuple[str, str], tuple]:
        """(operation, axis) -> payload bytes of a step that nothing hides; None: not known."""
        return _changed(_exposed(self.before), _exposed(self.after), 0)

    def __bool__(self) -> bool:
        return bool(self.memory or self.flops or self.collectives or self.exposed)

    def __str__(self) -> str:
        if not self:
            return "no number differs"
        rows = [(name, size(a), size(b), _ratio(a, b)) for name, (a, b) in self.memory.items()]
        if self.flops:
            rows.append(("operations", *map(operations, self.flops), _ratio(*self.flops)))
        for (op, axis), (a, b) in self.collectives.items():
            words = [f"{times(number(s.count))} x, {size(number(s.total_bytes))}" for s in (a, b)]
            rows.append((f"{op} over {axis}", *words, _ratio(a.total_bytes, b.total_bytes)))
        for (op, axis), (a, b) in self.exposed.items():
            rows.append((f"exposed {op} over {axis}", size(a), size(b), _ratio(a, b)))
        return "\n".join(columns(("per device", "before", "after", ""), rows, right=(1, 2, 3)))


def _changed(before: dict, after: dict, nothing) -> dict:
    keys = sorted({**before, **after}, key=lambda key: (key[1], key[0]))
    pairs = {key: (before.get(key, nothing), after.get(key, nothing)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _exposed(report: Report) -> dict[tuple[str, str], int | float | None]:
    found: dict = {}
    for item in report.overlap:
        key = item.op, "+".join(item.axes)
        if item.exposed and item.axes:
            known = found.get(key, 0)
            unknown = known is None or item.total_bytes is None
            found[key] = None if unknown else known + item.total_bytes
    return {key: number(count) for key, count in found.items()}


def _ratio(before, after) -> str:
    return f"x {float(after / before):.2f}" if before and after is not None else ""
