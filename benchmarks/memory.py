"""Memory of a train step, layout by layout: by formula, as XLA counts it for GPUs, and for CPUs.

    python benchmarks/memory.py [--layouts h100x8_zero3 ...] [--cpu]

compiles each layout of mesh_configs/ that is made for a cluster, for the model and the batch of its
header, and prints GiB per device and how far the formula (`jaxpar.costs_memory`) is from XLA's
peak. It needs no GPU, and no number in it depends on the machine but the seconds. --cpu: also for
emulated devices, where there are at most 8.
"""

import argparse
import re
import shlex
from importlib.resources import files

import jax
from flax import nnx

import jaxpar as jp
from jaxpar.cli.compile import CompileConfig, find_target
from jaxpar.cli.flags import parse_flags
from jaxpar.cluster.target import Target
from jaxpar.costs_memory import step_memory
from jaxpar.costs_pipeline import stored_model
from jaxpar.train_config import TrainConfig, load_model

GIB = 2**30
CPU_DEVICES = 8


def command(name: str) -> CompileConfig | None:
    """The `jaxpar compile` of a layout's header; None where it has none."""
    text = files("jaxpar.mesh_configs").joinpath(f"{name}.toml").read_text()
    found = re.search(r"jaxpar compile((?: .*\\\n#)* .*)\n", text)
    if found is None:
        return None
    words = shlex.split(found[1].replace("\\\n#", " "))
    return parse_flags(CompileConfig, words, "jaxpar compile")


def compile_layout(config: CompileConfig, on_cpu: bool = False):
    """(report, bytes by the formula, part by part) of a layout for its model and batch."""
    layout, target = find_target(config)
    module, model_config = load_model(config.model)
    settings = TrainConfig()
    tx, _ = settings.optimizer()

    def init(key):
        model = module.Model(model_config, rngs=nnx.Rngs(key))
        return model, tx.init(model)

    kernel = "blockwise" if on_cpu else None  # XLA's own would store the scores
    mesh = target.mesh(layout, across_hosts=("context",))
    plan = jp.make_plan(layout, init, mesh=mesh, attention_kernel=kernel)
    shape = (config.global_batch, config.seq_len)
    formula = step_memory(plan, stored_model(plan.state[0], layout), *shape)
    if on_cpu:
        target = Target(gpu="cpu", nodes=1, gpus_per_node=layout.num_devices)
    report = jp.cluster.compile(
        plan, target, shape, tx=tx, clip_norm=settings.clip_norm, across_hosts=("context",)
    )
    return report, formula


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layouts", nargs="*", default=[n for n in jp.layout_names() if command(n)]
    )
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    jp.emulate_devices(CPU_DEVICES)
    jax.config.update("jax_enable_compilation_cache", False)
    print("| layout | XLA, GPU | formula | formula / XLA | XLA, CPU | compile, s |")
    print("|---|---|---|---|---|---|")
    for name in args.layouts:
        config = command(name)
        report, formula = compile_layout(config)
        on_cpu = "-"
        if args.cpu and report.target.num_devices <= CPU_DEVICES:
            on_cpu = f"{compile_layout(config, on_cpu=True)[0].memory.peak / GIB:.2f}"
        peak = report.memory.peak
        print(
            f"| {name} | {peak / GIB:.2f} | {formula.total / GIB:.2f} | {formula.total / peak:.3f} "
            f"| {on_cpu} | {report.compile_seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
