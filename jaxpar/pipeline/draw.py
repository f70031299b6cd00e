"""Pictures of a table: text for a terminal, and SVG.

The one idea: one row per stage. The text has one column per tick, in which a stage's F, B and W
stand side by side; in the SVG a task is as wide as its cost, so that white is idle time. Both end
with the same numbers, from `summary`. No JAX import here.
"""

import io
from html import escape

from rich.console import Console
from rich.text import Text

from jaxpar.pipeline.schedules import KINDS, Task
from jaxpar.pipeline.table import Table
from jaxpar.pipeline.timing import UNIT, Costs, bubble, makespan, makespan_async, tick_times

STYLES = {"F": "black on bright_blue", "B": "black on bright_green", "W": "black on bright_yellow"}
FILLS = {"F": "#8db6f2", "B": "#8fd6a2", "W": "#f2d888"}


def summary(table: Table, costs: Costs = UNIT) -> list[tuple[str, str]]:
    """The numbers under a picture, as (name, value) rows.

    >>> from jaxpar.pipeline.table import lower
    >>> dict(summary(lower("1f1b", stages=2, microbatches=4)))["live"]
    '3 1 microbatches kept per stage'
    """
    prices = {"F": costs.F, "B": costs.backward(table.splits_backward)}
    if table.splits_backward:
        prices["W"] = costs.W
    if costs.send:
        prices["send"] = costs.send
    at = ", ".join(f"{name}={value:g}" for name, value in prices.items())
    lockstep, ideal = makespan(table, costs), makespan_async(table, costs)
    kept = "microbatch-chunks" if table.chunks > 1 else "microbatches"
    slots = {"activations": table.slots_stage, "gradients": table.slots_grad}
    if table.splits_backward:
        slots["B to W"] = table.slots_cut
    messages = ", ".join(
        f"{table.messages(kind)} {name} in {table.exchanges(kind)} exchanges"
        for kind, name in (("F", "forward"), ("B", "backward"))
    )
    return [
        ("ticks", str(len(table.ticks))),
        ("makespan", f"{lockstep:g} lockstep, {ideal:g} asynchronous (per stage: {at})"),
        ("bubble", f"{100 * bubble(table, costs):.1f} % of the lockstep makespan is idle"),
        ("live", f"{_join(table.live)} {kept} kept per stage"),
        ("slots", "; ".join(f"{name} {_join(counts)}" for name, counts in slots.items())),
        ("messages", messages),
    ]


def _join(counts: tuple[int, ...]) -> str:
    return " ".join(str(n) for n in counts)


def title(table: Table) -> str:
    """The schedule and its sizes, in one line."""
    sizes = (
        (table.stages, "stage"),
        (table.microbatches, "microbatch"),
        (table.chunks, "chunk"),
    )
    words = (f"{n} {word}{_plural(n, word)}" for n, word in sizes)
    return f"{table.schedule}: {', '.join(words)}{' per stage' if table.chunks > 1 else ''}"


def _plural(n: int, word: str) -> str:
    return "" if n == 1 else "es" if word.endswith("ch") else "s"


# ---- text ----


def text(table: Table, color: bool = True, width: int = 80, costs: Costs = UNIT) -> str:
    """Draws the table for a terminal `width` columns wide; `color` adds ANSI codes.

    Ticks that do not fit continue in the next block of rows.

    >>> from jaxpar.pipeline.table import lower
    >>> print(text(lower("1f1b", stages=2, microbatches=2), color=False))  # doctest: +ELLIPSIS
    1f1b: 2 stages, 2 microbatches, 1 chunk
    <BLANKLINE>
    tick     0  1     2     3
    stage 0  F0 F1    B0    B1
    stage 1     F0 B0 F1 B1
    <BLANKLINE>
    ticks     4
    ...
    """
    out = Text(title(table) + "\n")
    label = len(f"stage {table.stages - 1}") + 2
    gap = "" if color else " "  # colours already tell the tasks of a tick apart
    columns = [_column(tick, rows, table.chunks, gap) for tick, rows in enumerate(table.ticks)]
    for block in _blocks(columns, max(width - label, 1)):
        for row in range(table.stages + 1):
            name = "tick" if row == 0 else f"stage {row - 1}"
            line = Text.assemble("\n", name.ljust(label))
            for i, (cells, size) in enumerate(block):
                line.append_text(cells[row])
                if i < len(block) - 1:
                    line.append(" " * (size - len(cells[row]) + 1))
            line.rstrip()
            out.append_text(line)
        out.append("\n")
    out.append("".join(f"\n{name:<10}{value}" for name, value in summary(table, costs)))
    return _ansi(out) if color else out.plain


def _column(tick: int, rows, chunks: int, gap: str) -> tuple[list[Text], int]:
    """The cells of one tick from top to bottom, and the width of its column."""
    cells = [Text(str(tick))]
    for row in rows:
        parts: list = [gap] * (2 * len(row) - 1)
        parts[::2] = [(task.text(chunks), STYLES[task.kind]) for task in row]
        cells.append(Text.assemble(*parts))
    return cells, max(len(cell) for cell in cells)


def _blocks(columns, width: int):
    """Cuts the columns into lists that are each at most `width` wide, one column at least."""
    block, used = [], 0
    for column in columns:
        if block and used + column[1] > width:
            yield block
            block, used = [], 0
        block.append(column)
        used += column[1] + 1
    yield block


def _ansi(out: Text) -> str:
    stream = io.StringIO()
    longest = max(len(line) for line in out.plain.splitlines())
    console = Console(
        file=stream,
        force_terminal=True,
        color_system="standard",
        no_color=False,
        legacy_windows=False,
        width=longest + 1,
        highlight=False,
    )
    console.print(out, end="")
    return stream.getvalue()


# ---- SVG ----


def svg(table: Table, costs: Costs = UNIT) -> str:
    """Draws the lockstep program as an SVG document; time runs to the right.

    Thin lines mark the ends of ticks, where the stages exchange.

    >>> from jaxpar.pipeline.table import lower
    >>> svg(lower("gpipe", stages=2, microbatches=2)).startswith("<svg")
    True
    """
    cost = costs.of(table)
    left, top, height = 70, 44, 26
    unit = _pixels(table, costs)
    end = left + unit * makespan(table, costs)
    bottom = top + height * table.stages
    body = [_svg_text(10, 22, title(table), "font-weight='bold'")]
    body += [_svg_text(10, top + height * s + 17, f"stage {s}") for s in range(table.stages)]
    x = float(left)
    for rows, time in zip(table.ticks, tick_times(table, costs), strict=True):
        for stage, row in enumerate(rows):
            body += _svg_tasks(row, table.chunks, x, top + height * stage, height, unit, cost)
        x += unit * float(time)
        body.append(
            f"<line x1='{x:.1f}' y1='{top - 4}' x2='{x:.1f}' y2='{bottom}' stroke='#bbbbbb'/>"
        )
    for i, (name, value) in enumerate(summary(table, costs)):
        body.append(_svg_text(10, bottom + 24 + 18 * i, name))
        body.append(_svg_text(90, bottom + 24 + 18 * i, value))
    size = (max(end + 10, 640.0), bottom + 24 + 18 * 6)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{size[0]:.0f}' height='{size[1]:.0f}' "
        f"viewBox='0 0 {size[0]:.0f} {size[1]:.0f}' font-family='sans-serif' font-size='12'>\n"
        "<rect width='100%' height='100%' fill='white'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _pixels(table: Table, costs: Costs) -> float:
    """Pixels per unit of time: the shortest task still holds its name, within a sane width."""
    kinds = KINDS if table.splits_backward else KINDS[:2]
    shortest = min(cost for kind in kinds if (cost := costs.of(table)[kind]) > 0)
    widest = max(len(task.text(table.chunks)) for order in table.orders for task in order)
    return min(8.0 * (widest + 1) / shortest, 20000 / makespan(table, costs))


def _svg_tasks(row: tuple[Task, ...], chunks, x, y, height, unit, cost) -> list[str]:
    """One stage's tasks in one tick, from left to right in the order they run."""
    out = []
    for task in sorted(row, key=lambda task: KINDS.index(task.kind)):
        size = unit * cost[task.kind]
        out.append(
            f"<rect x='{x:.1f}' y='{y}' width='{size:.1f}' height='{height - 2}' "
            f"fill='{FILLS[task.kind]}' stroke='#555555'/>"
        )
        out.append(_svg_text(x + size / 2, y + 16, task.text(chunks), "text-anchor='middle'"))
        x += size
    return out


def _svg_text(x: float, y: float, content: str, extra: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {extra}>{escape(content)}</text>"
