"""jaxpar: every kind of parallelism for training language models, in one jitted JAX program."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpar import cluster, data, dims, nn, pipeline, testing
    from jaxpar.batch import pad_batch
    from jaxpar.checkpoint import Checkpoint
    from jaxpar.layout import Layout
    from jaxpar.layout_files import layout_names, load_layout
    from jaxpar.mesh import emulate_devices, initialize, make_mesh
    from jaxpar.nn.context_attention import attention
    from jaxpar.nn.params import decay_mask
    from jaxpar.plan import Plan, make_plan
    from jaxpar.zero import shard, whole_leaves, zero_shardings

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Layout",
    "Plan",
    "attention",
    "cluster",
    "data",
    "decay_mask",
    "dims",
    "emulate_devices",
    "initialize",
    "layout_names",
    "load_layout",
    "make_mesh",
    "make_plan",
    "nn",
    "pad_batch",
    "pipeline",
    "shard",
    "testing",
    "whole_leaves",
    "zero_shardings",
]

_MODULES = ("cluster", "data", "dims", "nn", "pipeline", "testing")
_HOMES = {
    "batch": ("pad_batch",),
    "checkpoint": ("Checkpoint",),
    "layout": ("Layout",),
    "layout_files": ("layout_names", "load_layout"),
    "mesh": ("emulate_devices", "initialize", "make_mesh"),
    "nn.context_attention": ("attention",),
    "nn.params": ("decay_mask",),
    "plan": ("Plan", "make_plan"),
    "zero": ("shard", "whole_leaves", "zero_shardings"),
}


def __getattr__(name):
    """Each name is loaded at first use, so that a command starts with no more than it needs."""
    if name in _MODULES:
        return importlib.import_module(f"jaxpar.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"jaxpar.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
