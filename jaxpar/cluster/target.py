"""The cluster that a program is compiled for: a GPU, nodes, GPUs in a node.

The one idea: XLA compiles for devices that are described to it, so a cluster is a small text. Its
devices are numbered node by node, and a device's number says which node it sits in.
"""

import contextlib
import ctypes.util
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxpar import chips
from jaxpar.layout import Layout
from jaxpar.mesh import emulate_devices, make_mesh

PLUGINS = {
    "jax_cuda12_plugin": ("jax-cuda12-plugin", "jax_plugins.xla_cuda12"),
    "jax_cuda13_plugin": ("jax-cuda13-plugin", "jax_plugins.xla_cuda13"),
}
"""Module of a CUDA plugin of JAX -> its package, and the module that registers it."""

_DESCRIPTION = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared_memory_per_core} threads_per_core_limit: 2048
  core_count: {chip.core_count} fpus_per_core: {chip.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {chip.memory_bandwidth} l2_cache_size: {chip.l2_bytes}
  clock_rate_ghz: {chip.clock_ghz} device_memory_size: {chip.memory_bytes}
  shared_memory_per_block_optin: {chip.shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.device_kinds[0]}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """`nodes` machines with `gpus_per_node` GPUs each, none of which needs to be there.

    `gpu` is a name of `jaxpar.chips`, such as "h100", or "cpu" for emulated devices. Raises
    ValueError for an unknown GPU and for sizes below 1.

    >>> target = Target(gpu="h100", nodes=64)
    >>> print(target, target.num_devices)
    512 x h100-80gb in 64 nodes of 8 512
    >>> target.crosses_nodes([(0, 1), (8, 9)]), target.crosses_nodes([(7, 8)])
    (False, True)
    """

    gpu: str = "h100"
    nodes: int = 1
    gpus_per_node: int = 8

    def __post_init__(self):
        for name in ("nodes", "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a size; use a whole number from 1 up")
        object.__setattr__(self, "gpu", self.gpu if self.is_cpu else chips.chip(self.gpu).name)

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are emulated."""
        return str(self.gpu).lower() == "cpu"

    @property
    def chip(self) -> chips.Chip | None:
        """What is known of the GPU; None for emulated devices."""
        return None if self.is_cpu else chips.chip(self.gpu)

    @property
    def num_devices(self) -> int:
        """GPUs of all nodes together."""
        return self.nodes * self.gpus_per_node

    def devices(self) -> tuple:
        """The devices to build meshes from, by number; they compile programs and run none.

        Raises ValueError where JAX's CUDA plugin is missing or of another version than jaxlib. For
        emulated devices raises RuntimeError where JAX already started with fewer.
        """
        if self.is_cpu:
            emulate_devices(self.num_devices)
            return tuple(jax.devices("cpu")[: self.num_devices])
        return _described(self.gpu, self.nodes, self.gpus_per_node)

    def mesh(self, layout: Layout, across_hosts: Sequence[str] = ()) -> Mesh:
        """The mesh of a layout on this cluster, as `jaxpar.make_mesh` makes it on a real one.

        Raises ValueError where the layout's axes do not multiply to `num_devices`, and for a
        tensor group on several nodes that `across_hosts` does not allow.
        """
        try:
            layout = layout.fill(self.num_devices)
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from None
        per_host = self.gpus_per_node
        return make_mesh(layout, self.devices(), across_hosts, devices_per_host=per_host)

    def crosses_nodes(self, groups: Iterable[Sequence[int]]) -> bool:
        """Whether any of these groups of device numbers, or pairs, spans several nodes."""
        node = self.gpus_per_node
        return any(len({device // node for device in group}) > 1 for group in groups)

    def __str__(self) -> str:
        """Such as "512 x h100-80gb in 64 nodes of 8"."""
        one = "one node" if self.nodes == 1 else f"{self.nodes} nodes of {self.gpus_per_node}"
        return f"{self.num_devices} x {self.gpu} in {one}"


def has_cudnn() -> bool:
    """Whether cuDNN is installed, as a Python package or on the system; nothing is loaded."""
    package = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
    return bool(package) or ctypes.util.find_library("cudnn") is not None


def check_plugin() -> str:
    """The module of the installed CUDA plugin, of the version that jaxlib needs.

    Raises ValueError for a plugin that is missing or of another version.
    """
    found = [name for name in PLUGINS if importlib.util.find_spec(name)]
    if not found:
        raise ValueError(
            "compiling for GPUs needs JAX's CUDA plugin, which is not installed (no GPU and no "
            "CUDA library is needed); run pip install 'jaxpar[cluster]', or take the target cpu"
        )
    package, jaxlib = PLUGINS[found[0]][0], importlib.metadata.version("jaxlib")
    version = importlib.metadata.version(package)
    if _numbers(version) != _numbers(jaxlib):
        raise ValueError(
            f"{package} {version} is installed with jaxlib {jaxlib}, and JAX takes a plugin of its "
            f"own version only; run pip install {package}=={jaxlib}"
        )
    return found[0]


def _numbers(version: str) -> str:
    return re.match(r"[\d.]*", version)[0].rstrip(".")


@functools.lru_cache(maxsize=32)
def _described(gpu: str, nodes: int, gpus_per_node: int) -> tuple:
    """The devices of a cluster; the same objects each time, so that meshes of them are equal."""
    plugin, chip = check_plugin(), chips.chip(gpu)
    major, minor = chip.compute_capability
    features = "feature_extension: ACCELERATED_FEATURES" if chip.accelerated_features else ""
    text = _DESCRIPTION.format(chip=chip, major=major, minor=minor, features=features)
    shape = dict(target_config=text, topology=f"1x{nodes}x{gpus_per_node}")
    with _plugin_as_it_is():
        try:
            found = topologies.get_topology_desc(platform="cuda", **shape)
        except NotImplementedError:  # JAX started before and refused the plugin: no CUDA library
            importlib.import_module(PLUGINS[plugin][1]).initialize()
            found = topologies.get_topology_desc(platform="cuda", **shape)
    return tuple(sorted(found.devices, key=lambda device: device.id))


@contextlib.contextmanager
def _plugin_as_it_is() -> Iterator[None]:
    """Lets JAX register its plugin although no CUDA library is there, which running would need."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)
