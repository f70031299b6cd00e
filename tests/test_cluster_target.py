"""A cluster that is not here: its devices, its nodes, and what cannot be."""

import importlib.metadata
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxpar as jp
from jaxpar.chips import CHIPS
from jaxpar.cluster import target as target_module
from jaxpar.cluster.hlo import axes_of_groups, parse
from jaxpar.cluster.target import Target, check_plugin

H100X16 = Target(gpu="h100", nodes=2)


def test_devices_are_numbered_node_by_node():
    devices = Target(gpu="h100", nodes=3, gpus_per_node=4).devices()
    assert [d.id for d in devices] == list(range(12))
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4 + [2] * 4
    assert {d.device_kind for d in devices} == {"NVIDIA H100 80GB HBM3"}


def test_the_devices_of_equal_targets_are_the_same():
    again = Target(gpu="h100-80gb", nodes=2, gpus_per_node=8)
    assert again == H100X16
    assert all(a is b for a, b in zip(again.devices(), H100X16.devices(), strict=True))
    assert again.mesh(jp.Layout(data=16)) == H100X16.mesh(jp.Layout(data=16))


@pytest.mark.parametrize("gpu", CHIPS)
def test_xla_compiles_for_every_gpu_of_the_table(gpu):
    (device,) = Target(gpu=gpu, gpus_per_node=1).devices()
    assert device.device_kind == CHIPS[gpu].device_kinds[0]
    x = jax.ShapeDtypeStruct(
        (256, 256), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    compiled = jax.jit(jnp.dot).lower(x, x).compile({"xla_gpu_autotune_level": 0})
    assert parse(compiled.as_text()).num_devices in (1, None)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 256 * 256 * 2


def test_tensor_groups_lie_inside_nodes_and_data_groups_across():
    mesh = H100X16.mesh(jp.Layout(data=2, tensor=8))
    numbers = [[d.id for d in row] for row in mesh.devices.reshape(2, 8)]
    assert axes_of_groups(tuple(map(tuple, numbers)), dict(mesh.shape)) == ("tensor",)
    assert not H100X16.crosses_nodes(numbers)
    assert H100X16.crosses_nodes(zip(*numbers, strict=True))


def test_pairs_of_devices_cross_nodes_when_one_pair_does():
    assert not H100X16.crosses_nodes([(0, 7), (8, 15)])
    assert H100X16.crosses_nodes([(0, 1), (7, 8)])
    assert not H100X16.crosses_nodes([])


@pytest.mark.parametrize("gpu", ["h100", "cpu"])
def test_a_tensor_group_on_several_nodes_is_refused_as_on_real_ones(gpu):
    target = Target(gpu=gpu, nodes=2, gpus_per_node=4)
    layout = jp.Layout(tensor=8)
    with pytest.raises(ValueError, match="tensor=8 puts one group of devices on several hosts"):
        target.mesh(layout)
    assert target.mesh(layout, across_hosts=("tensor",)).size == 8


def test_emulated_devices_are_those_of_this_process():
    target = Target(gpu="cpu", nodes=2, gpus_per_node=4)
    assert target.devices() == tuple(jax.devices("cpu")[:8]) and target.chip is None
    assert target.crosses_nodes([(3, 4)]) and not target.crosses_nodes([(4, 7)])


def test_a_target_reads_as_a_sentence():
    assert str(H100X16) == "16 x h100-80gb in 2 nodes of 8"
    assert str(Target(gpu="b200")) == "8 x b200-180gb in one node"
    assert H100X16.num_devices == 16 and H100X16.chip is CHIPS["h100-80gb"]


WRONG = {
    "unknown GPU": (dict(gpu="h1000"), "no GPU 'h1000' in the table; did you mean 'h100-80gb'"),
    "two sizes": (dict(gpu="a100"), "comes in several sizes; use a100-40gb or a100-80gb"),
    "no node": (dict(nodes=0), "nodes=0 is not a size; use a whole number from 1 up"),
    "half a GPU": (dict(gpus_per_node=0.5), "gpus_per_node=0.5 is not a size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_target_that_cannot_be_is_refused(name):
    settings, words = WRONG[name]
    with pytest.raises(ValueError) as error:
        Target(**settings)
    assert words in str(error.value)


def test_a_layout_of_another_size_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="16 x h100-80gb in 2 nodes of 8: data=8 = 8 devices"):
        H100X16.mesh(jp.Layout(data=8))


def test_without_the_plugin_one_sentence_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    hide = lambda name, *a: None if name in target_module.PLUGINS else real(name, *a)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    with pytest.raises(ValueError, match=r"run pip install 'jaxpar\[cluster\]'") as error:
        Target(gpu="h200", gpus_per_node=3).devices()
    assert "\n" not in str(error.value)


def test_a_plugin_of_another_version_is_refused(monkeypatch):
    real = importlib.metadata.version
    other = lambda name: "0.9.1" if name == "jax-cuda12-plugin" else real(name)  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "version", other)
    with pytest.raises(ValueError) as error:
        check_plugin()
    jaxlib = real("jaxlib")
    assert f"jax-cuda12-plugin 0.9.1 is installed with jaxlib {jaxlib}" in str(error.value)
    assert f"pip install jax-cuda12-plugin=={jaxlib}" in str(error.value)


CODE = """
import jax
{before}
from jaxpar import _jax_compat
from jaxpar.cluster.target import Target
print(len(Target(gpu="h100", nodes=64).devices()), _jax_compat.backend_started())
print(jax.devices()[0].platform, jax.config.jax_platforms)
"""


@pytest.mark.parametrize(
    ("before", "started"), [("", "False"), ("jax.devices()", "True")], ids=["before", "after"]
)
def test_devices_are_there_before_and_after_jax_started_on_its_own(before, started):
    """JAX itself refuses the plugin where no CUDA library is installed."""
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before)], capture_output=True, text=True
    )
    assert run.stdout.split() == ["512", started, "cpu", "None"], run.stderr
