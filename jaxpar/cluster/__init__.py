"""Compile for a target that is not here, and read the compiled program back.

    report = jp.cluster.compile(plan, jp.cluster.Target(gpu="h100", nodes=2), (16, 4096), tx=tx)
    print(report)

The readers of HLO text are in `jaxpar.cluster.hlo`.
"""

import importlib

_HOMES = {
    "compile": "compiler",
    "Target": "target",
    "Report": "report",
    "GPU_OPTIONS": "options",
    "gpu_options": "options",
}

__all__ = ["GPU_OPTIONS", "Report", "Target", "compile", "gpu_options"]


def __getattr__(name):
    """Loaded at first use: the readers of HLO alone need no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpar.cluster' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxpar.cluster.{_HOMES[name]}"), name)
