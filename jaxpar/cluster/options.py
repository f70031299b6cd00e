"""XLA options for GPUs: named presets, as `jax.jit(compiler_options=...)` takes them.

The one idea: flags live here, each with its reason, and nowhere else; a run on GPUs and a
compile without them take the same preset, so that the one says what the other does.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxpar.layout import nearest

GPU_OPTIONS: Mapping[str, Mapping[str, bool | int | str]] = MappingProxyType(
    {
        "none": MappingProxyType({}),
        "overlap": MappingProxyType(
            {
                # order instructions so that transfers run behind computation
                "xla_gpu_enable_latency_hiding_scheduler": True,
                # with 1, the default, a third of the bytes that ZeRO 3 gathers wait for each other
                # with nothing to hide behind; with 4 none do
                "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
            }
        ),
    }
)
"""Name of a preset -> XLA options of a run on GPUs. `overlap` is what runs take by default."""

DEVICELESS_OPTIONS: Mapping[str, bool | int | str] = MappingProxyType(
    {
        # do not time kernels on a GPU, which is not there
        "xla_gpu_autotune_level": 0,
    }
)
"""What compiling without a GPU needs on top."""


def gpu_options(preset: str = "overlap") -> dict[str, bool | int | str]:
    """The XLA options of a preset; ValueError for an unknown one, naming the nearest.

    >>> gpu_options("overlap")["xla_gpu_enable_latency_hiding_scheduler"]
    True
    """
    if preset not in GPU_OPTIONS:
        raise ValueError(f"there is no preset {preset!r}; {nearest(preset, GPU_OPTIONS)}")
    return dict(GPU_OPTIONS[preset])
