"""`jaxpar train`: flags in, a progress bar on the way, a table at the end."""

import dataclasses
import sys
import time
from collections.abc import Sequence

from jaxpar.cli.flags import parse_flags
from jaxpar.cli.quiet import without_plugin_lines
from jaxpar.train_config import TrainConfig

LINES = 10
"""Lines of progress where stdout is not a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxpar train` and returns its exit code; errors are raised."""
    try:
        config = parse(sys.argv[2:] if argv is None else argv)
    except SystemExit:  # --help
        return 0
    with without_plugin_lines():
        from jaxpar.train import train

        with Screen(config) as screen:
            result = train(config, screen.show)
    print_result(result)
    return 0


def parse(argv: Sequence[str]) -> TrainConfig:
    """The config that flags ask for, on top of --config FILE or of the run that --resume names."""
    argv, path = _take(list(argv), "--config")
    _, folder = _take(list(argv), "--resume")
    if path is None and folder:
        path = f"{folder}/config.toml"
    default = TrainConfig() if path is None else TrainConfig.from_toml(path)
    return parse_flags(TrainConfig, argv, "jaxpar train", default)


def _take(argv: list[str], flag: str) -> tuple[list[str], str | None]:
    """(the arguments without a flag, its value or None)."""
    for i, arg in enumerate(argv):
        if arg.startswith(flag + "="):
            return argv[:i] + argv[i + 1 :], arg.partition("=")[2]
        if arg == flag:
            if i + 1 == len(argv):
                raise ValueError(f"{flag} needs a value")
            return argv[:i] + argv[i + 2 :], argv[i + 1]
    return argv, None


class Screen:
    """Shows a run under way: a bar with loss, tokens/s and time left, or a few plain lines."""

    def __init__(self, config: TrainConfig):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        self.config, self.console = config, Console()
        self.tokens, self.rate, self.began = config.global_batch * config.seq_len, 0.0, time.time()
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"), TextColumn("left"), TimeLeft(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("training", total=config.steps, state="")

    def __enter__(self) -> "Screen":
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def show(self, record: dict) -> None:
        """Takes a record of metrics.jsonl, or a note."""
        if "note" in record:
            self._line(record["note"])
        elif "eval_loss" in record:
            bits = record["eval_bits_per_byte"]
            more = "" if bits is None else f", {bits:.3f} bits per byte"
            self._line(f"step {record['step']}: held-out loss {record['eval_loss']:.4f}{more}")
        else:
            self._step(record)

    def _step(self, record: dict) -> None:
        now, step, steps = self.tokens / record["step_time_s"], record["step"], self.config.steps
        self.rate = 0.9 * self.rate + 0.1 * now if self.rate else now
        text = f"loss {record['loss']:.3f}  {self.rate:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, state=text)
        if self.bar.disable and (step * LINES // steps > (step - 1) * LINES // steps):
            left = (steps - step) * self.tokens / self.rate
            self._line(f"step {step}/{steps}  {text}  {left:.0f} s left")

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_result(result) -> None:
    """The table at the end of a run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result.steps} steps, {result.folder}", title_justify="left",
                  show_header=False)  # fmt: skip
    for name, value in result_rows(result):
        table.add_row(name, value)
    Console().print(table, markup=False)


def result_rows(result) -> list[tuple[str, str]]:
    """(name, text) of everything that a run ended with."""
    held_out = "nothing was held out"
    if result.eval_loss is not None:
        held_out = f"{result.eval_loss:.4f}"
        if result.eval_bits_per_byte is not None:
            held_out += f" = {result.eval_bits_per_byte:.3f} bits per byte"
    settings = [(f.name, getattr(result.layout, f.name), f.default)
                for f in dataclasses.fields(result.layout)]  # fmt: skip
    layout = " ".join(f"{k}={v}" for k, v, default in settings
                      if v != default or k in ("zero", "precision"))  # fmt: skip
    rows = [
        ("parameters", f"{result.parameters:,}"),
        ("loss, first and last", f"{result.loss_first:.4f}, {result.loss_last:.4f}"),
        ("loss, held out", held_out),
        ("tokens per second", f"{result.tokens_per_s:,.0f}"),
        ("memory per device", f"{result.memory_per_device / 2**20:,.1f} MiB"),
        ("compile time", f"{result.compile_s:.1f} s"),
        ("layout", layout),
    ]
    if result.mfu is not None:
        rows.insert(4, ("MFU", f"{100 * result.mfu:.1f} %"))
    if result.skipped:
        rows.append(("skipped steps", f"{result.skipped}: loss or gradient not finite"))
    return rows
