"""Devices and their order: pipe outermost, tensor innermost, tensor groups inside one host."""

import warnings
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar import _jax_compat
from jaxpar.layout import AXES, Layout


def emulate_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices on this machine; call it before the first use of JAX.

    Does nothing where JAX already runs on `count` or more CPU devices. Raises RuntimeError where
    JAX started with something else: it reads the number of devices only once.
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"emulate_devices({count!r}): give a whole number of devices from 1 up")
    if _jax_compat.backend_started():
        devices = jax.devices()
        if devices[0].platform == "cpu" and len(devices) >= count:
            return
        raise RuntimeError(
            f"emulate_devices({count}) came after JAX had started with {len(devices)} "
            f"{devices[0].platform} device(s); call it before the first JAX call of the program "
            "(jax.devices, any array, any jit)"
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def initialize(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Joins the processes of one job, through `jax.distributed.initialize`.

    Without arguments JAX reads the place of this process from SLURM, Open MPI or Kubernetes.
    Raises RuntimeError when JAX already started: it would train alone.
    """
    if _jax_compat.backend_started():
        raise RuntimeError(
            "jaxpar.initialize() came after JAX had started, so this process would train alone; "
            "move it before the first JAX call of the program"
        )
    jax.distributed.initialize(coordinator, processes, process)


def make_mesh(
    layout: Layout,
    devices: Sequence | None = None,
    across_hosts: Sequence[str] = (),
    *,
    devices_per_host: int | None = None,
) -> Mesh:
    """The mesh of a layout: all six axes, outermost first, on `devices` (default: all).

    Devices are ordered by host, then by number, so the order is the same on every process. Each
    device knows its host, except those that are only described or emulated: for them
    `devices_per_host` says how many in a row share one.
    A tensor group that spans hosts is refused unless "tensor" is in `across_hosts`; context and
    expert groups that do are warned of. Raises ValueError where sizes and devices do not fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    if layout.num_devices > len(devices) and -1 not in layout.axis_sizes.values():
        platform = devices[0].platform
        hint = (
            f"call jaxpar.emulate_devices({layout.num_devices}) before the first JAX call"
            if platform == "cpu"
            else "use smaller axes or more devices"
        )
        raise ValueError(
            f"mesh needs {layout.num_devices} devices "
            f"({', '.join(f'{a}={n}' for a, n in layout.axis_sizes.items() if n > 1)}), "
            f"found {len(devices)} ({platform}); {hint}"
        )
    layout = layout.fill(len(devices))
    if devices_per_host is not None and devices_per_host < 1:
        raise ValueError(f"devices_per_host={devices_per_host} is too small; use 1 or more")
    host = _host if devices_per_host is None else lambda d: d.id // devices_per_host
    devices.sort(key=lambda d: (host(d), d.id))
    grid = np.array(devices, dtype=object).reshape([layout.axis_sizes[a] for a in AXES])
    for axis in ("tensor", "context", "expert"):
        _check_hosts(grid, host, axis, axis in across_hosts)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _host(device) -> int:
    """The machine a device sits in: several processes may share one."""
    slice_index = getattr(device, "slice_index", None)
    return device.process_index if slice_index is None else slice_index


def _check_hosts(grid: np.ndarray, host: Callable, axis: str, asked: bool):
    hosts = np.vectorize(host, otypes=[int])(grid)
    groups = np.moveaxis(hosts, AXES.index(axis), -1).reshape(-1, grid.shape[AXES.index(axis)])
    if (groups == groups[:, :1]).all() or asked:
        return
    per_host = int((hosts == hosts.flat[0]).sum())
    sentence = (
        f"{axis}={groups.shape[1]} puts one group of devices on several hosts "
        f"({per_host} devices each), over the slow links between them"
    )
    if axis == "tensor":
        raise ValueError(
            f"{sentence}; use a tensor size that divides {per_host}, "
            "or make_mesh(..., across_hosts=('tensor',))"
        )
    warnings.warn(sentence, stacklevel=3)
