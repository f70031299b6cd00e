"""`jaxpar compile`: what a train step needs and does on a cluster that is not here.

The one idea: the flags say a plan and a target; everything shown is read from the program that XLA
compiled for it. What does not fit ends with code 3, and with settings that fit.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxpar import chips
from jaxpar.cli import quiet
from jaxpar.cli.flags import parse_flags
from jaxpar.layout import BATCH_AXES, Layout
from jaxpar.layout_files import load_layout, override

if TYPE_CHECKING:
    from jaxpar.cluster.target import Target

DEFAULT_GPU = "h100"
NODE = 8
"""GPUs in a node, unless said otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Compiles a train step for a cluster that need not be there, and reads the program back.

    Shows memory per device, what is sent over which axis, what hides it, and warnings. It runs
    nothing and needs no GPU. Exit code 0 when the program fits, 3 when it does not, 2 for mistakes.
    """

    model: str = ""
    """FAMILY:PRESET, such as llama:8b or gpt2:124m."""
    layout: str = ""
    """Name of a layout of mesh_configs/, or the path of a TOML file."""
    set: tuple[str, ...] = ()
    """KEY=VALUE, a field of the layout to change, such as tensor=4 or remat=block."""
    seq_len: int = 4096
    """Tokens of a row."""
    global_batch: int = 0
    """Rows of a batch; 0: one row for each microbatch of each group of devices."""
    gpu: str = ""
    """A GPU, such as h100 or a100-80gb. By default the one in the layout's name, else h100."""
    nodes: int = 0
    """Machines; 0: as many as the layout's devices need."""
    gpus_per_node: int = 0
    """Devices in a machine; 0: 8, or all where the layout has fewer."""
    target: Literal["gpu", "cpu"] = "gpu"
    """gpu, or cpu for emulated devices."""
    json: bool = False
    """Print one JSON object and nothing else; does not look for settings that fit."""
    hlo: str = ""
    """Also write the optimized program to this file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxpar compile` and returns its exit code, 0 or 3; errors are raised."""
    try:
        config = parse_flags(
            CompileConfig, sys.argv[2:] if argv is None else argv, "jaxpar compile"
        )
    except SystemExit:  # --help
        return 0
    with quiet.stderr_without(quiet.LOG):
        return run(config)


def run(config: CompileConfig) -> int:
    """Compiles, prints and returns the exit code."""
    job = prepare(config)
    if not config.json:
        chosen = "" if config.gpu or job.target.is_cpu else f" (no --gpu given: {job.target.gpu})"
        print(f"compiling {config.model} for {job.target}{chosen}\n", flush=True)
    report = job.try_layout(job.layout)
    if config.hlo:
        Path(config.hlo).write_text(report.text, encoding="utf-8")
    print(json.dumps(report.to_json()) if config.json else report, flush=True)
    if report.fits is not False:
        return 0
    from jaxpar.cluster.report_text import size

    too_much = f"does not fit: {size(-report.memory.left)} more than a device has to give"
    if config.json:
        print(f"jaxpar compile: {too_much}", file=sys.stderr)
    else:
        print(f"\n{too_much}", flush=True)
        print_fits(job, report.memory.usable)
    return 3


@dataclasses.dataclass(frozen=True)
class Job:
    """What the flags ask for: `try_layout(layout) -> Report`, and what it is tried with.

    `state_bytes` are those of parameters and optimizer state, all devices together.
    """

    try_layout: Callable
    layout: Layout
    target: "Target"
    state_bytes: int


def prepare(config: CompileConfig) -> Job:
    """Everything a user can get wrong is found here."""
    for name in ("model", "layout"):
        if not getattr(config, name):
            raise ValueError(f"no {name} given; write --{name}, see jaxpar compile --help")
    from jaxpar.train_config import TrainConfig, load_model

    module, model_config = load_model(config.model)
    layout, target = find_target(config)
    rows = config.global_batch or layout.size(BATCH_AXES) * layout.microbatches
    for name, value in (("seq_len", config.seq_len), ("global_batch", rows)):
        if value < 1:
            raise ValueError(f"{name}={value} is too small; use 1 or more")
    if config.seq_len > model_config.max_seq_len:
        raise ValueError(
            f"seq_len {config.seq_len} is above the {model_config.max_seq_len} that "
            f"{config.model} was made for; use at most that"
        )
    if config.hlo and not Path(config.hlo).absolute().parent.is_dir():
        raise ValueError(f"hlo {config.hlo} is in a folder that does not exist; make it first")
    if config.hlo and Path(config.hlo).is_dir():
        raise ValueError(f"hlo {config.hlo} is a folder; give the name of a file in it")
    _leave_gpus_alone()
    settings = TrainConfig()
    tx, _ = settings.optimizer()

    @functools.cache
    def plan_of(layout: Layout):
        return _plan(module, model_config, tx, layout, target, (rows, config.seq_len))

    def try_layout(layout: Layout):
        from jaxpar.cluster.compiler import compile

        shape = (rows, config.seq_len)
        return compile(plan_of(layout), target, shape, tx=tx, clip_norm=settings.clip_norm)

    import jax

    leaves = jax.tree.leaves(plan_of(layout).state)
    return Job(try_layout, layout, target, sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))


def _plan(module, model_config, tx, layout: Layout, target, shape: tuple[int, int]):
    """The plan of a model with its optimizer on the target; refuses a batch that does not fit."""
    import jax
    import numpy as np
    from flax import nnx

    from jaxpar.batch import check_batch
    from jaxpar.plan import make_plan

    def init(key):
        model = module.Model(model_config, rngs=nnx.Rngs(key))
        return model, tx.init(model)

    array = jax.ShapeDtypeStruct(shape, np.int32)
    check_batch(layout, dict.fromkeys(("tokens", "targets", "weights"), array))
    return make_plan(layout, init, mesh=target.mesh(layout))


def find_target(config: CompileConfig) -> "tuple[Layout, Target]":
    """(the layout with all sizes known, the target that the flags ask for)."""
    from jaxpar.cluster.target import Target

    if config.target == "cpu" and config.gpu:
        raise ValueError(f"gpu {config.gpu} has no meaning with target cpu; leave one of them out")
    layout = override(load_layout(config.layout), config.set)
    is_open = -1 in layout.axis_sizes.values()
    if is_open and not config.nodes:
        raise ValueError(
            f"layout {config.layout} takes the devices that are left; say how many with --nodes "
            "and --gpus-per-node"
        )
    count = 0 if is_open else layout.num_devices
    per_node = config.gpus_per_node or (min(NODE, count) if count else NODE)
    if not config.nodes and per_node > 0 and count % per_node:
        raise ValueError(
            f"layout {config.layout} has {count} devices, which nodes of {per_node} do not make "
            "up; give --nodes and --gpus-per-node that multiply to it"
        )
    gpu = "cpu" if config.target == "cpu" else config.gpu or gpu_of(config.layout)
    nodes = config.nodes or count // max(per_node, 1)
    target = Target(gpu=gpu, nodes=nodes, gpus_per_node=per_node)
    if count not in (0, target.num_devices):
        raise ValueError(
            f"layout {config.layout} has {count} devices, and nodes={target.nodes} of "
            f"gpus_per_node={per_node} make {target.num_devices}; give numbers that multiply to "
            f"{count}, or change the layout's axes"
        )
    return layout.fill(target.num_devices), target


def gpu_of(layout_name: str) -> str:
    """The GPU in a layout's name; of several sizes the largest. h100 where it names none.

    >>> gpu_of("h200x8"), gpu_of("configs/a100x256.toml"), gpu_of("data8")
    ('h200-141gb', 'a100-80gb', 'h100')
    """
    stem = Path(layout_name).stem.lower()
    named = [chip for name, chip in chips.CHIPS.items() if name.partition("-")[0] in stem]
    whole = [chip for chip in named if chip.name in stem] or named
    return max(whole, key=lambda chip: chip.memory_bytes).name if whole else DEFAULT_GPU


def print_fits(job: Job, usable: int) -> None:
    """Compiles layouts that need less memory and prints those that fit in `usable` bytes."""
    from jaxpar.cluster.fitting import Fit, search
    from jaxpar.cluster.report_text import columns

    each = job.state_bytes / job.layout.num_devices
    if each > usable:
        print(
            f"no layout of {job.layout.num_devices} devices can fit: parameters and optimizer "
            f"state alone take {_gib(each)} of each when they are split over all; use "
            f"{-(-job.state_bytes // usable)} devices or more"
        )
        return
    print("trying settings that need less, each compiled", flush=True)

    def show(fit: Fit) -> None:
        words = "fits" if fit.report.fits else "does not fit"
        print(f"  {_flags(fit.settings)}: {_gib(fit.report.memory.peak)}, {words}", flush=True)

    found = search(job.layout, job.try_layout, progress=show)
    if found.fits:
        rows = [
            (_gib(f.report.memory.peak), _gib(f.report.memory.left), _flags(f.settings))
            for f in found.fits
        ]
        print("\n" + "\n".join(columns(("peak", "left", "it fits with"), rows, right=(0, 1))))
    if len(found.fits) < 3:
        least = "" if found.fits or found.least is None else (
            f"; the least was {_gib(found.least.report.memory.peak)}, with "
            f"{_flags(found.least.settings)}"
        )  # fmt: skip
        print(
            f"\n{len(found.fits) or 'none'} of {found.tried} layouts tried fit{least}; for more "
            "room use more devices, a shorter seq_len or a smaller global_batch"
        )


def _flags(settings: Sequence[str]) -> str:
    return " ".join(f"--set {setting}" for setting in settings)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def _leave_gpus_alone() -> None:
    """Has JAX start on the CPU alone: nothing runs, and GPUs that are here stay free."""
    import jax

    from jaxpar import _jax_compat

    if not _jax_compat.backend_started():
        jax.config.update("jax_platforms", "cpu")
