"""`jaxpar train` as a function: the loop of the README, with checks before it and a result after.

The one idea: everything that can go wrong goes wrong in `prepare` or while compiling; only then is
the run's folder made, and one compiled step runs over and over.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import chips, costs, data
from jaxpar.checkpoint import Checkpoint
from jaxpar.cluster.options import gpu_options
from jaxpar.layout import Layout
from jaxpar.metrics import MetricsLog, read_metrics, tensorboard_sink, wandb_sink
from jaxpar.train_config import TrainConfig
from jaxpar.train_setup import Setup, prepare

PATIENCE = {"xla_cpu_collective_call_terminate_timeout_seconds": 1800}
"""Emulated devices share a few cores, so one may wait long for another, and XLA ends a process in
which one waits 40 seconds."""

Progress = Callable[[dict], None]
"""Called with each record of metrics.jsonl, and {"note": ...} before something slow."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run ended with. Losses in nats per token, None where nothing was held out or known."""

    folder: Path
    layout: Layout
    steps: int
    loss_first: float
    loss_last: float
    eval_loss: float | None
    eval_bits_per_byte: float | None
    tokens_per_s: float
    mfu: float | None
    parameters: int
    memory_per_device: int
    compile_s: float
    skipped: int


def train(config: TrainConfig, progress: Progress = lambda record: None) -> Result:
    """Trains as `config` says and returns what came out; the run's folder holds the rest.

    Raises ValueError or RuntimeError, in one sentence, for what cannot work, before anything is
    written; RuntimeError when the loss stops being finite.

    >>> train(TrainConfig(steps=2, seq_len=16, out="runs/two")).steps  # doctest: +SKIP
    2
    """
    setup = prepare(config)
    plan = setup.plan
    progress({"note": f"compiling for {plan.mesh.size} devices"})
    options = xla_options(setup)
    if options:
        words = ", ".join(f"{name}={value}" for name, value in options.items())
        progress({"note": f"XLA options {config.xla_options!r}: {words}"})
    step, compile_s = compile_step(setup, options)
    folder = Path(config.resume) if config.resume else make_folder(config)
    every = config.checkpoint_every or config.steps
    with Checkpoint(folder / "checkpoint", plan, every=every) as checkpoint:
        state, start = checkpoint.restore() or (plan.init(jax.random.key(config.seed)), 0)
        write_config(setup, folder)
        with _metrics_log(setup, folder, start) as log:
            state = _run(setup, step, state, start, log, checkpoint, progress)
    return _result(setup, folder, step, compile_s)


def xla_options(setup: Setup) -> dict:
    """The preset of XLA options that the run asks for, on GPUs; none on CPUs.

    They are those that `jaxpar compile` compiles with.
    """
    on_gpus = setup.plan.mesh.devices.flat[0].platform in ("gpu", "cuda")
    return gpu_options(setup.config.xla_options) if on_gpus else {}


def compile_step(setup: Setup, options: dict):
    """(the train step, compiled for the run's one batch shape; seconds it took).

    A compiled function takes what it was compiled for and nothing else, so no step can compile
    a second time unseen.
    """
    c = setup.config
    step = setup.plan.train_step(
        setup.tx, clip_norm=c.clip_norm or None, skip_nonfinite=c.skip_nonfinite
    )
    state = jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        jax.eval_shape(setup.plan.stored, setup.plan.state),
        setup.plan.shardings,
    )
    batch = next(_batches(setup, 0, 1))
    before = time.perf_counter()
    compiled = step.lower(state, batch).compile(compiler_options={**options, **_patience(setup)})
    return compiled, time.perf_counter() - before


def _patience(setup: Setup) -> dict:
    return PATIENCE if setup.plan.mesh.devices.flat[0].platform == "cpu" else {}


def _batches(setup: Setup, start: int, steps: int):
    c = setup.config
    return data.batches(
        setup.documents,
        setup.plan,
        global_batch=c.global_batch,
        seq_len=c.seq_len,
        seed=c.seed,
        start=start,
        steps=steps,
        split="all",
    )


def _run(setup: Setup, step, state, start: int, log: MetricsLog, checkpoint, progress: Progress):
    """Steps start + 1 .. steps, with evaluations and checkpoints on the way and at the end."""
    c = setup.config
    evaluate = evaluation(setup)
    for number, batch in enumerate(_batches(setup, start, c.steps - start), start + 1):
        state, metrics = step(state, batch)
        _report(setup, log.step(number, metrics), progress)
        last = number == c.steps
        if last or (c.eval_every and number % c.eval_every == 0):
            _report(setup, log.flush(), progress)
            loss = evaluate(state[0])
            if loss is not None:
                progress(log.evaluation(number, loss, setup.heldout.bytes_per_token))
        if last or number % checkpoint.every == 0:
            _report(setup, log.flush(), progress)
            checkpoint.save(number, state, force=last)
    return state


def _report(setup: Setup, record: dict | None, progress: Progress) -> None:
    """Shows a step's record; ends the run at the first loss that is not finite."""
    if record is None:
        return
    progress(record)
    if not setup.config.skip_nonfinite and not math.isfinite(record["loss"] + record["grad_norm"]):
        raise RuntimeError(
            f"step {record['step']}: the loss is {record['loss']} and the gradient norm "
            f"{record['grad_norm']}, and every later step would be lost; use a lower lr "
            f"(now {setup.config.lr:g}) or --skip-nonfinite"
        )


def evaluation(setup: Setup) -> Callable[[Any], float | None]:
    """model -> mean loss over every held-out token, each counted once; compiled once."""
    c = setup.config
    function = jax.jit(setup.plan.loss(setup.module.loss), compiler_options=_patience(setup))

    def evaluate(model) -> float | None:
        batches = (
            data.heldout_batches(
                setup.heldout,
                setup.plan,
                global_batch=c.global_batch,
                seq_len=c.seq_len,
                split="all",
                max_rows=c.eval_rows or None,
            )
            if len(setup.heldout)
            else ()
        )
        parts = jax.device_get([function(model, batch) for batch in batches])
        count = sum(float(n) for _, n in parts)
        return sum(float(s) for s, _ in parts) / count if count else None

    return evaluate


def make_folder(config: TrainConfig) -> Path:
    """Makes the run's folder: `out`, or runs/NAME with a number where that is taken."""
    if config.out:
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    name = config.name or config.model.replace(":", "-")
    number = 1
    while True:
        folder = Path("runs", name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def write_config(setup: Setup, folder: Path) -> None:
    """Writes config.toml and layout.toml, from which the run can be repeated."""
    on_cpu = setup.plan.mesh.devices.flat[0].platform == "cpu"
    config = dataclasses.replace(
        setup.config,
        layout="layout.toml",
        set=(),
        name=folder.name,
        devices=setup.plan.mesh.size if on_cpu else 0,
    )
    again = f"# Repeat this run with: jaxpar train --config {folder / 'config.toml'}\n"
    (folder / "layout.toml").write_text(setup.plan.layout.to_toml(), encoding="utf-8")
    (folder / "config.toml").write_text(again + config.to_toml(), encoding="utf-8")


def _metrics_log(setup: Setup, folder: Path, start: int) -> MetricsLog:
    c, sinks = setup.config, []
    if c.tensorboard:
        sinks.append(tensorboard_sink(folder / "tensorboard"))
    if c.wandb:
        sinks.append(wandb_sink(folder, folder.name, dataclasses.asdict(c)))
    rates = np.asarray(jax.vmap(setup.rate)(np.arange(c.steps)))
    return MetricsLog(folder, lambda i: rates[i], start=start, sinks=sinks)


def _result(setup: Setup, folder: Path, step, compile_s: float) -> Result:
    records = read_metrics(folder / "metrics.jsonl")
    steps = [r for r in records if "loss" in r]
    evals = [r for r in records if "eval_loss" in r]
    seconds = statistics.median(r["step_time_s"] for r in steps)
    memory = step.memory_analysis()
    return Result(
        folder=folder,
        layout=setup.plan.layout,
        steps=steps[-1]["step"],
        loss_first=_number(steps[0]["loss"]),
        loss_last=_number(steps[-1]["loss"]),
        eval_loss=evals[-1]["eval_loss"] if evals else None,
        eval_bits_per_byte=evals[-1]["eval_bits_per_byte"] if evals else None,
        tokens_per_s=setup.config.global_batch * setup.config.seq_len / seconds,
        mfu=utilization(setup, seconds),
        parameters=sum(x.size for x in jax.tree.leaves(setup.plan.state[0])),
        memory_per_device=memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        compile_s=compile_s,
        skipped=steps[-1]["skipped"],
    )


def _number(value: float | None) -> float:
    """A number of metrics.jsonl, where null stands for what is not finite."""
    return math.nan if value is None else value


def utilization(setup: Setup, step_time_s: float) -> float | None:
    """Model FLOPs utilization (MFU): model FLOPs per second over the devices' peak in bf16.

    Model FLOPs as `costs.model_flops` defines them: causal attention counted half, no
    recomputation. None on devices whose peak is not known, such as CPUs.
    """
    chip = chips.chip_of(setup.plan.mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    c = setup.config
    flops = c.global_batch * costs.training_flops(setup.plan.state[0], c.seq_len)
    return flops / step_time_s / (chip.peak_bf16_flops * setup.plan.mesh.size)
