"""jaxpar: every kind of parallelism for training language models, in one jitted JAX program."""

from jaxpar import data, dims, nn, pipeline
from jaxpar.layout import Layout, layout_names, load_layout
from jaxpar.mesh import emulate_devices, initialize, make_mesh
from jaxpar.nn.params import decay_mask
from jaxpar.plan import Plan, make_plan
from jaxpar.zero import shard, whole_leaves, zero_shardings

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Layout",
    "Plan",
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
    "pipeline",
    "shard",
    "whole_leaves",
    "zero_shardings",
]


def __getattr__(name):
    """Checkpoints bring orbax with them, so it is loaded at first use."""
    if name == "Checkpoint":
        from jaxpar.checkpoint import Checkpoint

        return Checkpoint
    raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
