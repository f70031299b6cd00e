"""Devices: found or emulated in time, in an order that keeps fast groups on one host."""

import dataclasses
import os
import random
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxpar as jp
from jaxpar import dims

# ---- in time


def python(code: str, **environment) -> subprocess.CompletedProcess:
    """Runs code in a process of its own, without this one's settings of JAX."""
    known = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60,
        env=known | {"JAX_PLATFORMS": "cpu"} | environment,
    )  # fmt: skip


LATE = """
import jax, jaxpar as jp
print(len(jax.devices()))
for call in (
    lambda: jp.emulate_devices(8),
    lambda: jp.initialize("localhost:1", 2, 0),
    lambda: jp.make_mesh(jp.Layout(data=8)),
    lambda: jp.make_mesh(jp.Layout(data=4, tensor=2)),
):
    try:
        call()
        print("nothing happened")
    except (RuntimeError, ValueError) as error:
        print(error)
"""


# jax-ml/jax#6887, google/flax#3232, pyro-ppl/numpyro#2096; jax-ml/jax#12258
def test_asking_for_devices_or_processes_too_late_says_what_to_move():
    run = python(LATE)
    assert run.returncode == 0, run.stderr
    count, emulate, initialize, mesh, two = run.stdout.splitlines()
    assert count == "1"
    assert emulate.startswith("emulate_devices(8) came after JAX had started with 1 cpu device(s)")
    assert "call it before the first JAX call of the program" in emulate
    assert "would train alone; move it before the first JAX call" in initialize
    assert mesh == (
        "mesh needs 8 devices (data=8), found 1 (cpu); "
        "call jaxpar.emulate_devices(8) before the first JAX call"
    )
    assert two.startswith("mesh needs 8 devices (data=4, tensor=2), found 1 (cpu)")


EARLY = """
import jaxpar as jp, jaxpar.train, jaxpar.models.llama, jaxpar.models.gpt2
from jaxpar import _jax_compat
print(_jax_compat.backend_started())
jp.emulate_devices(8)
print(_jax_compat.backend_started())
import jax
print(len(jax.devices()), jp.make_mesh(jp.Layout(data=4, tensor=2)).shape["data"])
jp.emulate_devices(4)
"""


# jax-ml/jax#24964: one process on Kubernetes was taken for a cluster
def test_devices_are_emulated_in_time_and_importing_starts_nothing():
    run = python(EARLY, KUBERNETES_SERVICE_HOST="10.0.0.1", KUBERNETES_SERVICE_PORT="443")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["False", "False", "8 4"]


@pytest.mark.parametrize("count", [0, -1, 2.5, "8"])
def test_a_number_of_devices_that_is_none_is_refused(count):
    with pytest.raises(ValueError, match="give a whole number of devices from 1 up"):
        jp.emulate_devices(count)


def test_sizes_that_leave_devices_over_are_refused():
    with pytest.raises(ValueError, match="data=2 x tensor=2 = 4 devices, found 8"):
        jp.make_mesh(jp.Layout(data=2, tensor=2))


# ---- in order


@dataclasses.dataclass(frozen=True)
class Device:
    """What make_mesh looks at: `id`, the process, and the slice where there is one."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"


def two_hosts(seed: int) -> list:
    """2 processes x 4 devices, shuffled; ids do not follow the processes."""
    devices = [Device(id=2 * i if i < 4 else 2 * (i - 4) + 1, process_index=i // 4)
               for i in range(8)]  # fmt: skip
    random.Random(seed).shuffle(devices)
    return devices


def hosts(mesh, axis) -> np.ndarray:
    """Process of each device, [groups, places along the axis]."""
    grid = np.vectorize(lambda d: d.process_index)(mesh.devices)
    at = mesh.axis_names.index(axis)
    return np.moveaxis(grid, at, -1).reshape(-1, grid.shape[at])


# jax-ml/jax#13021, apple/axlearn#80
@pytest.mark.parametrize(
    "sizes", [dict(data=2, tensor=4), dict(pipe=2, tensor=4), dict(data=4, tensor=2)], ids=str
)
def test_a_tensor_group_lies_inside_one_process_and_the_order_is_the_same_everywhere(sizes):
    meshes = [jp.make_mesh(jp.Layout(**sizes), two_hosts(seed)) for seed in range(5)]
    groups = hosts(meshes[0], "tensor")
    assert (groups == groups[:, :1]).all()
    for mesh in meshes[1:]:
        assert mesh.devices.tolist() == meshes[0].devices.tolist()


def test_a_tensor_group_over_several_hosts_is_refused_unless_asked_for():
    with pytest.raises(ValueError, match="tensor=8 puts one group .* on several hosts .4 devices"):
        jp.make_mesh(jp.Layout(tensor=8), two_hosts(0))
    mesh = jp.make_mesh(jp.Layout(tensor=8), two_hosts(0), across_hosts=("tensor",))
    assert hosts(mesh, "tensor").tolist() == [[0] * 4 + [1] * 4]


@pytest.mark.parametrize("axis", ["context", "expert"])
def test_a_context_or_expert_group_over_several_hosts_is_warned_of_by_name(axis):
    with pytest.warns(UserWarning, match=f"{axis}=8 puts one group of devices on several hosts"):
        jp.make_mesh(jp.Layout(**{axis: 8}), two_hosts(0))
    inside = jp.make_mesh(jp.Layout(**{"data": 2, axis: 4}), two_hosts(0))
    assert hosts(inside, axis).tolist() == [[0] * 4, [1] * 4]


def test_two_processes_of_one_slice_are_one_host():
    devices = [Device(id=i, process_index=i // 4, slice_index=0) for i in range(8)]
    assert jp.make_mesh(jp.Layout(tensor=8), devices).shape["tensor"] == 8


def test_the_outermost_axis_goes_over_the_slowest_links():
    mesh = jp.make_mesh(jp.Layout(pipe=2, data=2, tensor=2), two_hosts(0))
    assert hosts(mesh, "pipe").tolist() == [[0, 1]] * 4
    assert mesh.axis_names == jp.layout.AXES


# ---- rules


MESH = jp.make_mesh(jp.Layout(data=4, tensor=2))


# google/flax#1702, google/flax#5124
@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: dims.spec(("embed", "fnn"), MESH), "no rule for a dim 'fnn'; did you mean 'ffn'?"),
        (lambda: dims.spec(("a",), MESH, rules={"a": ("tensr",)}),
         "the rule for dim 'a' names an axis 'tensr'; did you mean 'tensor'?"),
        (lambda: dims.spec(("heads", "ffn"), MESH),
         "dims 'heads' and 'ffn' of one array are both split over tensor; an axis can split one"),
        (lambda: dims.spec(("embed",), MESH, rules={}), "no rule for a dim 'embed'; known: none"),
        (lambda: dims.spec(("ffn",), MESH, (7,)),
         "dim 'ffn' of size 7 does not split into tensor=2 = 2 equal parts; use a size that is a"),
        (lambda: dims.spec(("ffn",), MESH, (8, 8)), "name 1 dimensions, the shape (8, 8) has 2"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_an_error_that_names_dim_and_axis(call, sentence):
    with pytest.raises(ValueError) as error:
        call()
    assert sentence in str(error.value)


def test_axes_that_a_mesh_lacks_split_nothing():
    small = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    assert dims.spec(("batch", "ffn"), small) == jax.sharding.PartitionSpec(None, "tensor")
