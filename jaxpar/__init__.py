"""jaxpar: every kind of parallelism for training language models, in one jitted JAX program."""

from jaxpar import dims, nn
from jaxpar.layout import Layout, layout_names, load_layout
from jaxpar.mesh import emulate_devices, initialize, make_mesh
from jaxpar.nn.params import decay_mask
from jaxpar.plan import Plan, make_plan

__version__ = "0.1.0"

__all__ = [
    "Layout", "Plan", "decay_mask", "dims", "emulate_devices", "initialize", "layout_names",
    "load_layout", "make_mesh", "make_plan", "nn",
]  # fmt: skip
