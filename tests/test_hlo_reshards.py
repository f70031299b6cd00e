"""Changes of sharding that the partitioner had to do, and how hard it was."""

import jax
import jax.numpy as jnp
import pytest
from hlo_samples import programs
from hlo_samples.handmade import MESH, module
from hlo_samples.programs import MESH_AXES
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.cluster import hlo
from jaxpar.cluster.hlo_warnings import find

OVER = "replica_groups=[2,4]<=[8]"
BY_JAX = 'metadata={op_name="jit(step)/shard_map/all_gather"}'


def told(text: str, axes=MESH) -> list[str]:
    return find(text, hlo.collectives(text, axes))


def told_of(entry: str, before: str = "") -> list[str]:
    return told(module(entry, before))


@pytest.fixture(scope="module")
def mesh():
    return programs.make_mesh(jax.devices("cpu"))


def resharded(mesh, before: P, after: P, function=lambda x: x * 2) -> list[str]:
    """What is told of a program that takes x[64, 128] from one sharding to another."""
    target = NamedSharding(mesh, after)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, before))
    constrained = lambda x: lax.with_sharding_constraint(function(x), target)  # noqa: E731
    lowered = jax.jit(constrained, out_shardings=target).lower(x)
    return told(lowered.compile().as_text(), MESH_AXES)


def test_an_array_gathered_whole_to_cut_another_part_out_is_told(mesh):
    (text,) = resharded(mesh, P("data", None), P(None, "tensor"))
    assert text.startswith("the partitioner put in all-gather over data of 32,768 bytes of f32, ")
    assert text.endswith(
        ": each device then keeps 8,192 bytes of it (a full rematerialization, the partitioner's "
        "last resort)"
    )


def test_a_change_of_sharding_in_several_moves_is_told(mesh):
    found = resharded(mesh, P("data", "tensor"), P("tensor", "data"))
    assert any("collective-permute over data+tensor of 4,096 bytes" in text for text in found)
    assert any(text.endswith("it moves again what all-to-all has just moved") for text in found)


@pytest.mark.parametrize("name", ["(jvp()/all_gather:all_gather)", "all_gather:psum"])
def test_collectives_that_xla_combined_under_a_joined_name_are_the_programs_own(name):
    metadata = f'metadata={{op_name="jit(step)/while/body/{name}"}}'
    gather = f"  ROOT %y = f32[256,8] all-gather(%x), dimensions={{0}}, {OVER}, "
    assert not told_of(gather + metadata)
    (text,) = told_of(gather + metadata.replace("all_gather:", "dot_general:"))
    assert text.startswith("the partitioner put in all-gather")


def test_a_single_move_of_the_partitioner_is_told_and_one_that_is_written_is_not(mesh):
    (text,) = resharded(mesh, P("tensor", None), P(None, None))
    assert text.startswith("the partitioner put in all-gather over tensor of 32,768 bytes")
    assert text.endswith(": it changes a sharding, and the program has no collective for that")

    def written(x):
        gather = lambda x: lax.all_gather(x * 2, "tensor", tiled=True)  # noqa: E731
        return jax.shard_map(gather, mesh=mesh, in_specs=P("tensor"), out_specs=P(),
                             check_vma=False)(x)  # fmt: skip

    assert resharded(mesh, P("tensor", None), P(None, None), written) == []


def test_sums_of_the_partitioner_are_not_told(mesh):
    text = programs.compile_automatic(programs.mlp_gradients, mesh, jnp.float32, *programs.MLP)
    assert "all-reduce(" in text and told(text, MESH_AXES) == []


SLICED = """%cut (a: f32[128,8], i: u32[]) -> f32[32,8] {
  %a = f32[128,8] parameter(0)
  %b = f32[128,8] bitcast(%a)
  %i = u32[] parameter(1)
  %zero = u32[] constant(0)
  ROOT %c = f32[32,8] dynamic-slice(%b, %i, %zero), dynamic_slice_sizes={32,8}
}
"""
START = f"(f32[32,8], f32[128,8]) all-gather-start(%x), {OVER}, dimensions={{0}}"


@pytest.mark.parametrize("index, is_own", [("partition-id()", True), ("constant(1)", False)])
def test_a_slice_at_the_devices_own_place_is_told_from_any_other(index, is_own):
    (text,) = told_of(
        f"  %s = {START}\n  %g = f32[128,8] all-gather-done(%s)\n  %i = u32[] {index}\n"
        "  ROOT %y = f32[32,8] fusion(%g, %i), kind=kLoop, calls=%cut",
        SLICED,
    )
    assert ("each device then keeps 1,024 bytes" in text) == is_own


def test_an_array_that_is_used_whole_as_well_is_not_called_rematerialized():
    entry = (
        f"  %s = {START}\n  %g = f32[128,8] all-gather-done(%s)\n  %i = u32[] partition-id()\n"
        "  %y = f32[32,8] fusion(%g, %i), kind=kLoop, calls=%cut\n"
        "  ROOT %z = f32[128,8] negate(%g)"
    )
    assert ["rematerialization" in text for text in told_of(entry, SLICED)] == [False]


def test_what_the_partitioner_marks_as_its_own_is_told_whatever_its_name():
    marked = 'frontend_attributes={is_spmd_generated="true"}'
    entry = f"  ROOT %g = f32[128,8] all-gather(%x), {OVER}, dimensions={{0}}, {BY_JAX}"
    assert told_of(entry) == []
    assert len(told_of(f"{entry}, {marked}")) == 1
