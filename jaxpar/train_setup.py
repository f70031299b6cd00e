"""Before a run: everything that a user can get wrong is found here, and nothing is written.

The one idea: `prepare` turns a config into a plan and documents, the cheapest checks first; JAX
starts only after the settings, the model's name, the layout's sizes and the data have passed.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpar import _jax_compat, data
from jaxpar.batch import check_batch
from jaxpar.layout import Layout
from jaxpar.layout_files import load_layout
from jaxpar.mesh import emulate_devices
from jaxpar.metrics import need
from jaxpar.plan import Plan, make_plan
from jaxpar.train_config import DEFAULT_LAYOUT, TrainConfig, load_model


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run that has passed every check: its model, its plan and its documents."""

    config: TrainConfig
    module: ModuleType
    plan: Plan
    tx: Any
    rate: Callable
    documents: data.Documents
    heldout: data.Documents


def prepare(config: TrainConfig) -> Setup:
    """Checks a config against this machine and plans the run; writes nothing."""
    _check_folders(config)
    for extra in ("tensorboard", "wandb"):
        if getattr(config, extra):
            need(extra)
    module, model_config = load_model(config.model)
    layout, count = find_layout(config)
    if config.seq_len > model_config.max_seq_len:
        raise ValueError(
            f"seq_len {config.seq_len} is above the {model_config.max_seq_len} that "
            f"{config.model} was made for; use at most that"
        )
    documents, heldout = load_data(config, model_config.vocab_size)
    if not has_gpus() or config.devices:
        emulate_devices(count)
    tx, rate = config.optimizer()

    def init(key):
        model = module.Model(model_config, rngs=nnx.Rngs(key))
        return model, tx.init(model)

    plan = make_plan(layout, init, devices=jax.devices()[:count])
    rows = jax.ShapeDtypeStruct((config.global_batch, config.seq_len), np.int32)
    check_batch(plan.layout, dict.fromkeys(("tokens", "targets", "weights"), rows))
    data.check_batch(plan, config.global_batch, config.seq_len)
    return Setup(config, module, plan, tx, rate, documents, heldout)


def find_layout(config: TrainConfig) -> tuple[Layout, int]:
    """(the layout with all sizes known, the number of devices it runs on)."""
    on_gpus = not config.devices and has_gpus()
    layout = config.resolve_layout(on_gpus)
    if on_gpus:
        count = len(jax.devices())
    elif config.devices or -1 not in layout.axis_sizes.values():
        count = config.devices or layout.num_devices
    else:
        count = load_layout(DEFAULT_LAYOUT).num_devices
    return layout.fill(count), count


def has_gpus() -> bool:
    """Whether JAX would run on GPUs here; found out without starting it."""
    if _jax_compat.backend_started():
        return jax.default_backend() == "gpu"
    asked = jax.config.jax_platforms
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return False
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    driver = Path("/dev/nvidiactl").exists()
    return driver and any(importlib.util.find_spec(name) for name in plugins)


def load_data(config: TrainConfig, vocab_size: int) -> tuple[data.Documents, data.Documents]:
    """(documents to train on, held-out documents), every token id below `vocab_size`."""
    documents = data.load_documents(
        config.data,
        config.tokenizer,
        dtype=config.token_dtype,
        eos=None if config.eos < 0 else config.eos,
        vocab_size=vocab_size,
    )
    return data.split_documents(documents, config.holdout)


def _check_folders(config: TrainConfig) -> None:
    out = Path(config.out)
    if config.out and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"out {out} exists and is not an empty folder; use a new one, or "
            f"resume={out} to go on with the run in it"
        )
    if not config.resume:
        return
    folder = Path(config.resume, "checkpoint")
    steps = [int(p.name) for p in folder.glob("*") if p.name.isdigit()] if folder.is_dir() else []
    if not steps:
        raise ValueError(f"resume {config.resume} has no checkpoint; give the folder of a run")
    if max(steps) >= config.steps:
        raise ValueError(
            f"{config.resume} is at step {max(steps)} of {config.steps} already; "
            "use more steps to go on"
        )
