"""Metrics of a run: one JSON object per step in metrics.jsonl; TensorBoard and W&B when asked.

The one idea: metrics are fetched from the devices one step late, when the next step is already on
its way, so that logging never makes the devices wait.
"""

import importlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Extra of pyproject.toml -> the package it brings."""


def need(extra: str):
    """Imports the package of an extra; ValueError says how to install it where it is missing.

    >>> need("wandb")  # doctest: +SKIP
    """
    try:
        return importlib.import_module(EXTRAS[extra])
    except ImportError:
        raise ValueError(
            f"{extra} needs the package {EXTRAS[extra]}, which is not installed; "
            f"run pip install 'jaxpar[{extra}]'"
        ) from None


class MetricsLog:
    """Writes the metrics of a run's steps and evaluations into `folder`, each line at once.

    `rate(step)` is the learning rate with which step number `step`, from 0, was taken. `start`
    steps are done already: lines of later steps that an earlier process wrote are dropped.
    """

    def __init__(
        self,
        folder: str | Path,
        rate: Callable[[int], float],
        *,
        start: int = 0,
        sinks: Sequence[Callable[[dict], Any]] = (),
    ):
        path = Path(folder) / "metrics.jsonl"
        old = read_metrics(path) if start and path.exists() else []
        kept = [record for record in old if record["step"] <= start]
        self._skipped = max((record.get("skipped", 0) for record in kept), default=0)
        self._file = path.open("w", encoding="utf-8")
        self._sinks = [self._write, *sinks]
        self._rate = rate
        self._pending: tuple | None = None
        self._done_at = -math.inf
        for record in kept:
            self._write(record)

    def step(self, number: int, metrics: Mapping[str, jax.Array]) -> dict | None:
        """Takes what `plan.train_step` returned for step `number`, counted from 1.

        Writes the step before it and returns that record; None if there is none.
        """
        now = time.perf_counter()
        record = self.flush()
        self._pending = (number, metrics, now)
        return record

    def flush(self) -> dict | None:
        """Waits for the step that is under way, writes it and returns its record."""
        if self._pending is None:
            return None
        number, metrics, sent_at = self._pending
        self._pending = None
        values = {k: v.item() for k, v in jax.device_get(dict(metrics)).items()}
        now = time.perf_counter()
        seconds, self._done_at = now - max(sent_at, self._done_at), now
        self._skipped += int(values["skipped"])
        record = {
            "step": number,
            "loss": values["loss"],
            "grad_norm": values["grad_norm"],
            "grad_norm_clipped": values["grad_norm_clipped"],
            "tokens": int(values["tokens"]),
            "lr": float(self._rate(number - 1)),
            "step_time_s": seconds,
            "skipped": self._skipped,
        }
        self._send(record)
        return record

    def evaluation(self, number: int, loss: float, bytes_per_token: float | None) -> dict:
        """Writes the mean loss over held-out tokens after step `number`, and its bits per byte."""
        bits = None if bytes_per_token is None else bits_per_byte(loss, bytes_per_token)
        record = {"step": number, "eval_loss": loss, "eval_bits_per_byte": bits}
        self._send(record)
        return record

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _send(self, record: dict) -> None:
        for sink in self._sinks:
            sink(record)

    def _write(self, record: dict) -> None:
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Bits a model needs per byte of text, from its loss in nats per token.

    >>> bits_per_byte(math.log(256), 1.0)
    8.0
    """
    return loss / math.log(2) / bytes_per_token


def read_metrics(path: str | Path) -> list[dict]:
    """The records of a metrics.jsonl; a last line that was cut short is left out."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def tensorboard_sink(folder: str | Path) -> Callable[[dict], None]:
    """A sink that writes every number of a record as a TensorBoard scalar."""
    writer = need("tensorboard").SummaryWriter(str(folder))

    def send(record: dict) -> None:
        for name, value in record.items():
            if name != "step" and value is not None:
                writer.add_scalar(name, value, record["step"])
        writer.flush()

    return send


def wandb_sink(folder: str | Path, name: str, config: dict) -> Callable[[dict], None]:
    """A sink that logs every record to a Weights & Biases run called `name`."""
    run = need("wandb").init(project="jaxpar", name=name, dir=str(folder), config=config)

    def send(record: dict) -> None:
        run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    return send
