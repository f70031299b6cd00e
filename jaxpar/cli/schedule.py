"""`jaxpar schedule`: draws a pipeline schedule and says what it costs, before anything is compiled.

The one idea: everything shown is read from the table that the executor would run. No JAX import.
"""

import argparse
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxpar.pipeline import draw
from jaxpar.pipeline.schedules import SCHEDULES
from jaxpar.pipeline.table import Table, lower
from jaxpar.pipeline.timing import Costs, bubble, makespan, makespan_async

DESCRIPTION = """\
Draws a pipeline schedule: which task each stage runs in each tick, the makespan of the lockstep
program and of an ideal asynchronous runtime, the bubble, the microbatches kept, slots, messages."""

COSTS = """\
times of one microbatch on one whole stage, such as F=1,B=1,W=1,send=0 (the default; what is left
out keeps it). F: forward; B: backward for the input; W: backward for the weights; a schedule that
does not split the backward, as the built-in ones, pays B+W for each B. send: one exchange"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxpar schedule` and returns its exit code; 2 after one sentence on stderr.

    >>> main(["1f1b", "--stages", "2", "--microbatches", "1", "--json"])  # doctest: +ELLIPSIS
    {"schedule": "1f1b", "stages": 2, "microbatches": 1, "chunks": 1, "ticks": 3, ...}
    0
    """
    try:
        args = _parser().parse_args(argv)
        costs = parse_costs(args.costs)
        if args.compare:
            _compare(args, costs)
        else:
            _show(args, costs)
    except (ValueError, OSError) as error:
        print(f"jaxpar schedule: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:  # --help
        return int(end.code or 0)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("jaxpar schedule", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("schedule", nargs="?", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default 8)")
    parser.add_argument("--chunks", type=int, default=1, help="model parts per stage (default 1)")
    parser.add_argument("--costs", default="", metavar="F=1,B=1,W=1,send=0", help=COSTS)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the picture as SVG")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no picture")
    parser.add_argument("--compare", action="store_true", help="all schedules side by side")

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message}; see jaxpar schedule --help")

    parser.error = refuse  # one sentence, instead of the usage and an exit
    return parser


def parse_costs(text: str) -> Costs:
    """Reads "F=1,B=1,W=1,send=0"; what is left out costs its default.

    >>> parse_costs("F=2,send=0.5")
    Costs(F=2.0, B=1.0, W=1.0, send=0.5)
    """
    names = [field.name for field in dataclasses.fields(Costs)]
    values: dict[str, float] = {}
    for entry in filter(None, text.split(",")):
        name, _, value = (part.strip() for part in entry.partition("="))
        if name not in names or name in values:
            raise ValueError(
                f'--costs {text}: "{entry}" does not set one of {", ".join(names)} once; '
                "use for example F=1,B=1,W=1,send=0"
            )
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = math.nan
        if not math.isfinite(values[name]):
            raise ValueError(f'--costs {text}: "{entry}" is not a number; use for example {name}=1')
    return Costs(**values)


def as_json(table: Table, costs: Costs) -> dict:
    """The table and its numbers as one JSON object.

    `live` and `slots` are per stage; `table` is a list of ticks, each a list over stages of the
    tasks run there, such as ["F3", "B0"]; `bubble` is the idle share of the lockstep makespan.
    """
    return {
        "schedule": table.schedule,
        "stages": table.stages,
        "microbatches": table.microbatches,
        "chunks": table.chunks,
        "ticks": len(table.ticks),
        "makespan": makespan(table, costs),
        "makespan_async": makespan_async(table, costs),
        "bubble": bubble(table, costs),
        "live": list(table.live),
        "slots": list(table.slots),
        "messages": {"forward": table.messages("F"), "backward": table.messages("B")},
        "table": [
            [[task.text(table.chunks) for task in row] for row in rows] for rows in table.ticks
        ],
    }


def _show(args: argparse.Namespace, costs: Costs) -> None:
    if args.schedule is None:
        raise ValueError(f"no schedule given: name one of {', '.join(SCHEDULES)}, or use --compare")
    table = lower(args.schedule, args.stages, args.microbatches, args.chunks)
    if args.svg:
        args.svg.write_text(draw.svg(table, costs), encoding="utf-8")
    if args.json:
        print(json.dumps(as_json(table, costs)))
        return
    width = shutil.get_terminal_size().columns
    print(draw.text(table, color=sys.stdout.isatty(), width=width, costs=costs))
    if args.svg:
        print(f"{'picture':<10}{args.svg}")


def _compare(args: argparse.Namespace, costs: Costs) -> None:
    if args.schedule is not None or args.svg:
        what = f'the schedule "{args.schedule}"' if args.schedule else "--svg"
        raise ValueError(f"--compare shows all schedules and ignores {what}; leave one of them out")
    tables = [_lower_for_comparison(name, args) for name in SCHEDULES]
    if args.json:
        print(json.dumps([as_json(table, costs) for table in tables]))
        return
    rows = [("schedule", [table.schedule for table in tables])]
    rows += [("chunks", [str(table.chunks) for table in tables])]
    rows += [("ticks", [str(len(table.ticks)) for table in tables])]
    rows += [("makespan", [f"{makespan(table, costs):g}" for table in tables])]
    rows += [("  asynchronous", [f"{makespan_async(table, costs):g}" for table in tables])]
    rows += [("bubble", [f"{100 * bubble(table, costs):.1f} %" for table in tables])]
    rows += [("live per stage", [_join(table.live) for table in tables])]
    rows += [("  in stages", [_join(n / t.chunks for n in t.live) for t in tables])]
    rows += [("slots per stage", [_join(table.slots) for table in tables])]
    rows += [("  for gradients", [_join(table.slots_grad) for table in tables])]
    rows += [("messages", [f"{t.messages('F')} + {t.messages('B')}" for t in tables])]
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(tables))]
    print(f"{args.stages} stages, {args.microbatches} microbatches\n")
    for name, cells in rows:
        line = "  ".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
        print(f"{name:<17}{line}".rstrip())
    if args.chunks == 1:
        print("\nWith 1 chunk interleaved is 1f1b; see the difference with --chunks 2.")
    else:
        print('\n1f1b has 1 chunk per stage. "in stages": live in whole stages\' activations.')


def _join(numbers) -> str:
    return " ".join(f"{n:g}" for n in numbers)


def _lower_for_comparison(name: str, args: argparse.Namespace) -> Table:
    """The schedule with the chunks asked for; 1f1b, which has one chunk per stage, with 1."""
    chunks = 1 if name == "1f1b" else args.chunks
    return lower(name, args.stages, args.microbatches, chunks)
