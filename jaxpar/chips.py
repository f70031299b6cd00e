"""What is known of each GPU: its peak rate, its memory, and the numbers XLA compiles for.

One table, one row per GPU; a new GPU is one row. No JAX import here. Sources: the numbers that
describe the device to XLA are those of its target config specs (openxla/xla,
xla/backends/gpu/target_config/specs/*.txtpb); peak and link rates are those of the vendor's
datasheets of A100, H100, H200 and B200: dense, without sparsity, links in one direction.
"""

import dataclasses
from collections.abc import Mapping

from jaxpar.layout import nearest

TERA, GIGA = 10**12, 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of GPU.

    `device_kinds`: the strings CUDA, and so `jax.Device.device_kind`, names it by; the first is the
    name in XLA's target config. Rates are per second: `memory_bandwidth` and `nvlink_bandwidth`
    (one direction) in bytes, `peak_bf16_flops` in dense bf16 operations. `core_count` counts
    streaming multiprocessors; sizes of memories are in bytes, shared memory's per core.
    """

    name: str
    device_kinds: tuple[str, ...]
    compute_capability: tuple[int, int]
    accelerated_features: bool
    memory_bytes: int
    memory_bandwidth: int
    core_count: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    peak_bf16_flops: float
    nvlink_bandwidth: float


_AMPERE = dict(
    compute_capability=(8, 0),
    accelerated_features=False,
    core_count=108,
    fpus_per_core=64,
    clock_ghz=1.41,
    l2_bytes=41_943_040,
    shared_memory_per_core=167_936,
    shared_memory_per_block_optin=166_912,
    peak_bf16_flops=312.0 * TERA,
    nvlink_bandwidth=300.0 * GIGA,
)
_HOPPER = dict(
    compute_capability=(9, 0),
    accelerated_features=True,
    core_count=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    l2_bytes=52_428_800,
    shared_memory_per_core=233_472,
    shared_memory_per_block_optin=232_448,
    peak_bf16_flops=989.4 * TERA,
    nvlink_bandwidth=450.0 * GIGA,
)

_ROWS = (
    Chip(
        name="a100-40gb",
        device_kinds=("NVIDIA A100-SXM4-40GB",),
        memory_bytes=42_331_013_120,
        memory_bandwidth=1_555_200_000_000,
        **_AMPERE,
    ),
    Chip(
        name="a100-80gb",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        memory_bytes=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        **_AMPERE,
    ),
    Chip(
        name="h100-80gb",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        memory_bytes=84_942_979_072,
        memory_bandwidth=3_352_320_000_000,
        **_HOPPER,
    ),
    Chip(
        name="h200-141gb",
        device_kinds=("NVIDIA H200 141GB HBM3e", "NVIDIA H200"),
        memory_bytes=151_397_597_184,
        memory_bandwidth=4_800_000_000_000,
        **_HOPPER,
    ),
    Chip(
        name="b200-180gb",
        device_kinds=("NVIDIA B200",),
        memory_bytes=191_514_411_008,
        memory_bandwidth=7_672_320_000_000,
        compute_capability=(10, 0),
        accelerated_features=True,
        core_count=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        l2_bytes=132_644_864,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        peak_bf16_flops=2250.0 * TERA,
        nvlink_bandwidth=900.0 * GIGA,
    ),
)

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _ROWS}
"""Short name -> GPU."""


def chip(name: str) -> Chip:
    """The GPU of a short name; the memory size may be left off where that says which one.

    Raises ValueError for a name that is unknown or fits several, naming the nearest.

    >>> chip("h100").name, chip("h100").peak_bf16_flops / 1e12
    ('h100-80gb', 989.4)
    """
    wanted = str(name).lower()
    if wanted in CHIPS:
        return CHIPS[wanted]
    found = [c for c in CHIPS if c.startswith(f"{wanted}-")]
    if len(found) == 1:
        return CHIPS[found[0]]
    if found:
        raise ValueError(f"GPU {name!r} comes in several sizes; use {' or '.join(found)}")
    raise ValueError(f"there is no GPU {name!r} in the table; {nearest(wanted, CHIPS)}")


def chip_of(device_kind: str) -> Chip | None:
    """The GPU that a `jax.Device.device_kind` string names; None where the table lacks it.

    >>> chip_of("NVIDIA H100 80GB HBM3").name
    'h100-80gb'
    >>> chip_of("cpu") is None
    True
    """
    return next((c for c in _ROWS if device_kind in c.device_kinds), None)
