"""Overlap in programs that XLA scheduled: for GPUs in `hlo_samples/*.txt`, and for CPUs here."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from hlo_samples import overlapped, programs

from jaxpar.cluster import hlo
from jaxpar.cluster.hlo_overlap import by_phase, overlaps


@pytest.mark.parametrize("version", ["jax0_10", "jax0_12"])
def test_on_gpus_the_exchanges_of_a_pipeline_hide_behind_products(version):
    path = pathlib.Path(overlapped.__file__).parent / f"gpu_{version}_overlapped.txt"
    gradient, activation, total = overlaps(path.read_text(), overlapped.MESH_AXES)
    product = 2 * overlapped.SIZE**3
    for item in (gradient, activation):
        assert (item.op, item.axes, item.count) == ("collective-permute", ("pipe",), 6)
        assert (item.exposed, item.flops_between) == (False, product)
        assert item.between[0].startswith("custom-call")
        # A product's result, and an activation read from its slot or added to the sum.
        assert item.bytes_between // (2 * overlapped.SIZE**2) == 2
    assert (total.op, total.exposed, total.flops_between) == ("all-reduce", True, 0)


@pytest.mark.parametrize("version", ["jax0_10", "jax0_12"])
@pytest.mark.parametrize("name", ["each_kind", "nested_scans", "combined", "branches"])
def test_every_collective_of_a_program_is_in_the_list(version, name):
    text = (pathlib.Path(programs.__file__).parent / f"gpu_{version}_{name}.txt").read_text()
    listed = hlo.collectives(text, programs.MESH_AXES)
    items = overlaps(text, programs.MESH_AXES)
    assert [(i.name, i.count, i.bytes) for i in items] == [
        (c.name, c.count, c.bytes) for c in listed
    ]
    assert all(i.exposed and i.flops_between == 0 for i in items)  # these programs have no products


def test_on_cpu_all_collectives_are_exposed():
    mesh = programs.make_mesh(jax.devices("cpu"))
    text = programs.compile_automatic(programs.mlp_gradients, mesh, jnp.float32, *programs.MLP)
    items = overlaps(text, programs.MESH_AXES)
    assert {i.op for i in items} == {"all-reduce"} and all(i.exposed for i in items)
    assert {exposure.share for exposure in by_phase(items).values()} == {1.0}
