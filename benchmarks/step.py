"""Step time, memory, communication and size of programs, layout by layout, side by side in one run.

    python benchmarks/step.py                                  # a handful of layouts, 8 CPU devices
    python benchmarks/step.py --layouts data8 zero3 cpu8_data4_tensor2 --model llama:tiny --json

A name is one of LAYOUTS below, of `mesh_configs/`, or the path of a TOML file. Each layout's step
is timed in turn with the step of the same global batch on one device (same remat, precision and
microbatches; "block" stands for "stage"), so that a busy machine slows both alike; the ratio is
that of the medians. Emulated devices share the machine's cores, all of which one device uses as
well: 1.0 means the same work, above is what the layout adds. CPU seconds, of all threads, say the
same where other programs run at the same time.
"""

import dataclasses
import functools
import importlib
import json
import statistics
import time
from typing import Annotated

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

import jaxpar as jp
from jaxpar.cluster import hlo

LAYOUTS = {
    "data8": dict(data=8, precision="fp32"),
    "zero3": dict(data=8, zero=3, precision="fp32"),
    "zero3_block": dict(data=8, zero=3, remat="block", precision="fp32"),
    "tensor4": dict(data=2, tensor=4, precision="fp32"),
    "replica2": dict(replica=2, data=4, microbatches=2, precision="fp32"),
    "pipe4": dict(pipe=4, data=2, microbatches=16, precision="fp32"),
    "pipe4_stage": dict(pipe=4, data=2, microbatches=16, remat="stage", precision="fp32"),
    "pipe4_chunks2": dict(
        pipe=4, data=2, microbatches=16, schedule="interleaved", chunks=2, precision="fp32"
    ),
    "pipe2_tensor2": dict(pipe=2, data=2, tensor=2, microbatches=16, precision="fp32"),
}
"""Name -> settings of the layouts measured by default, in the type that CPUs compute in."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained: a preset, fields changed after it, and the global batch [rows, seq_len]."""

    model: str = "llama:tiny"
    global_batch: int = 32
    seq_len: int = 128


@dataclasses.dataclass(frozen=True)
class Sent:
    """Collectives of one kind in a step: executions, payload bytes, bytes a device sends."""

    op: str
    axes: tuple[str, ...]
    count: int
    payload_bytes: int
    wire_bytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one layout; times in seconds, bytes per device."""

    layout: str
    settings: dict
    ratio: float
    cpu_ratio: float
    step_seconds: float
    one_device_seconds: float
    compile_seconds: float
    temp_bytes: int
    argument_bytes: int
    hlo_lines: int
    collectives: list[Sent]


@dataclasses.dataclass
class Job:
    """A compiled train step and the state it has reached."""

    layout: jp.Layout
    program: jax.stages.Compiled
    state: object
    batch: dict
    compile_seconds: float

    def step(self) -> tuple[float, float]:
        """Runs one step; returns its seconds, and the CPU seconds of all threads."""
        start, cpu = time.perf_counter(), time.process_time()
        self.state, metrics = self.program(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start, time.process_time() - cpu


def find_layout(name: str) -> jp.Layout:
    """A layout of the table above, of `mesh_configs/`, or in a TOML file."""
    return jp.Layout(**LAYOUTS[name]) if name in LAYOUTS else jp.load_layout(name)


def find_model(name: str):
    """(module, config) of family:preset, with fields changed as in llama:tiny:num_layers=8."""
    family, preset, *changes = name.split(":")
    module = importlib.import_module(f"jaxpar.models.{family}")
    fields = (change.split("=") for change in ",".join(changes).split(",") if change)
    return module, module.preset(preset, **{field: int(value) for field, value in fields})


def random_batch(vocab_size: int, work: Work, sharding) -> dict:
    """Random tokens and targets, all counted."""
    rng = np.random.default_rng(0)
    shape = (work.global_batch, work.seq_len)
    draw = lambda: rng.integers(0, vocab_size, shape).astype(np.int32)  # noqa: E731
    batch = dict(tokens=draw(), targets=draw(), weights=np.ones(shape, np.float32))
    return jax.device_put(batch, sharding)


def prepare(layout: jp.Layout, work: Work) -> Job:
    """Compiles the train step (AdamW, clipping) of `work` under a layout."""
    module, config = find_model(work.model)
    tx = optax.adamw(3e-4, mask=jp.decay_mask)

    def init(key):
        model = module.Model(config, rngs=nnx.Rngs(key))
        return model, tx.init(model)

    plan = jp.make_plan(layout, init, devices=jax.devices()[: layout.num_devices])
    state = plan.init(jax.random.key(0))
    batch = random_batch(config.vocab_size, work, plan.batch_sharding)
    lowered = plan.train_step(tx, clip_norm=1.0).lower(state, batch)
    start = time.perf_counter()
    program = lowered.compile()
    return Job(layout, program, state, batch, time.perf_counter() - start)


@functools.cache
def one_device(remat: str, precision: str, microbatches: int, work: Work) -> Job:
    """The same work on one device; shared by the layouts that ask for the same."""
    remat = "block" if remat == "stage" else remat
    layout = jp.Layout(remat=remat, precision=precision, microbatches=microbatches)
    return prepare(layout, work)


def measure(name: str, layout: jp.Layout, work: Work, steps: int) -> Row:
    """One row: `steps` steps of the layout and of one device, in turn, after a warm-up of two."""
    job = prepare(layout, work)
    single = one_device(layout.remat, layout.precision, layout.microbatches, work)
    times = [(*single.step(), *job.step()) for _ in range(steps + 2)][2:]
    alone, alone_cpu, parallel, cpu = (statistics.median(c) for c in zip(*times, strict=True))
    memory, text = job.program.memory_analysis(), job.program.as_text()
    found = hlo.by_axis(hlo.collectives(text, layout.axis_sizes))
    settings = {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)
                if getattr(layout, f.name) != f.default}  # fmt: skip
    return Row(
        layout=name, settings=settings, ratio=parallel / alone, cpu_ratio=cpu / alone_cpu,
        step_seconds=parallel, one_device_seconds=alone, compile_seconds=job.compile_seconds,
        temp_bytes=memory.temp_size_in_bytes, argument_bytes=memory.argument_size_in_bytes,
        hlo_lines=len(text.splitlines()),
        collectives=[Sent(op, axes, *traffic) for (op, axes), traffic in found.items()],
    )  # fmt: skip


def as_json(rows: list[Row], work: Work, steps: int) -> str:
    """Everything measured, as one object."""
    rows = [dataclasses.asdict(row) for row in rows]
    run = dict(jax=jax.__version__, platform=jax.devices()[0].platform, steps=steps)
    return json.dumps({**run, **dataclasses.asdict(work), "rows": rows}, indent=2, default=str)


def as_tables(rows: list[Row], work: Work) -> tuple[Table, Table]:
    """One line per layout; and what a device sends per step, one line per operation and axes."""
    title = f"{work.model}, global batch {work.global_batch} x {work.seq_len} tokens"
    times = _table(title, ("layout",), ("x one device", "x its CPU s", "step ms", "compile s",
                                        "temp MiB", "arguments MiB", "HLO lines"))  # fmt: skip
    sent = _table("sent per step and device", ("layout", "axes", "operation"),
                  ("executions", "payload bytes", "bytes sent"))  # fmt: skip
    for row in rows:
        times.add_row(row.layout, f"{row.ratio:.2f}", f"{row.cpu_ratio:.2f}",
                      f"{1e3 * row.step_seconds:.1f}", f"{row.compile_seconds:.1f}",
                      f"{row.temp_bytes / 2**20:.2f}", f"{row.argument_bytes / 2**20:.2f}",
                      f"{row.hlo_lines:,}")  # fmt: skip
        for s in sorted(row.collectives, key=lambda s: (s.axes, s.op)):
            numbers = (f"{n:,}" for n in (s.count, s.payload_bytes, s.wire_bytes))
            sent.add_row(row.layout, "+".join(s.axes), s.op, *numbers)
    return times, sent


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def main(
    layouts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = tuple(LAYOUTS),
    model: str = Work.model,
    global_batch: int = Work.global_batch,
    seq_len: int = Work.seq_len,
    steps: int = 10,
    json: bool = False,
) -> None:
    """Measures layouts against one device, side by side.

    Args:
        layouts: names in this file or in mesh_configs, or paths of TOML files.
        model: a preset, such as llama:tiny or gpt2:tiny.
        global_batch: rows of a step.
        seq_len: tokens of a row.
        steps: timed steps of each layout, after two that are not.
        json: print one JSON object instead of the table.
    """
    chosen = {name: find_layout(name) for name in layouts}
    jp.emulate_devices(max(layout.num_devices for layout in chosen.values()))
    work = Work(model, global_batch, seq_len)
    console = Console(stderr=json)
    rows = []
    for name, layout in chosen.items():
        with console.status(f"measuring {name}"):
            rows.append(measure(name, layout, work, steps))
    if json:
        print(as_json(rows, work, steps))
    else:
        console.print(*as_tables(rows, work))


if __name__ == "__main__":
    tyro.cli(main)
