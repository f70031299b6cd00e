"""What is legal and probably not meant: in text written by hand, and in programs XLA compiled."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from hlo_samples import programs
from hlo_samples.handmade import MESH, module
from hlo_samples.programs import MESH_AXES
from jax import lax

import jaxpar as jp
from compiled import compiled, model_shapes
from jaxpar import costs
from jaxpar.cluster import hlo
from jaxpar.cluster.hlo_warnings import find
from jaxpar.costs import Transfer

OVER = "replica_groups=[2,4]<=[8]"
BY_JAX = 'metadata={op_name="jit(step)/shard_map/all_gather"}'


def told(text: str, axes=MESH, expected=None) -> list[str]:
    return find(text, hlo.collectives(text, axes), expected=expected)


def told_of(entry: str, before: str = "", expected=None) -> list[str]:
    return told(module(entry, before), expected=expected)


@pytest.fixture(scope="module")
def mesh():
    return programs.make_mesh(jax.devices("cpu"))


def gpu_text(version: str, name: str) -> str:
    return (pathlib.Path(programs.__file__).parent / f"gpu_{version}_{name}.txt").read_text()


def row(op: str, size: int, axes=("tensor",), count: int = 1) -> Transfer:
    return Transfer("x", op, axes, count, size, 4)


# f32 on the wire


GATHER = f"f32[128,8] all-gather(%w), {OVER}, dimensions={{0}}, {BY_JAX}"
STARTED = (
    f"  %s = (f32[32,8], f32[128,8]) all-gather-start(%w), {OVER}, dimensions={{0}}, {BY_JAX}\n"
    "  %g = f32[128,8] all-gather-done(%s)"
)
ASKED_FOR = 'metadata={op_name="jit(step)/convert_element_type"}'


@pytest.mark.parametrize("gather", [f"  %g = {GATHER}", STARTED], ids=["sync", "async"])
def test_values_that_were_bf16_just_before_they_are_gathered_are_told(gather):
    lines = [
        "  %n = bf16[32,8] parameter(1)",
        f"  %w = f32[32,8] convert(%n), {ASKED_FOR}",
        gather,
        "  ROOT %y = f32[128,8] negate(%g)",
    ]
    assert told_of("\n".join(lines)) == [
        "all-gather over tensor of 4,096 bytes of f32, once a step (jit(step)/shard_map/"
        "all_gather) sends 4,096 bytes that were bf16 just before; as bf16 it would send less"
    ]


def test_values_that_are_only_read_as_bf16_after_they_are_summed_are_told():
    (text,) = told_of(
        f"  %r = f32[32,8] all-reduce(%x), {OVER}, to_apply=%sum\n"
        f"  ROOT %y = bf16[32,8] convert(%r), {ASKED_FOR}"
    )
    assert text.endswith("that are only read as bf16; as bf16 it would send less, with less "
                         "precise sums")  # fmt: skip


def test_values_that_are_read_as_f32_as_well_are_not_told():
    entry = (
        f"  %r = f32[32,8] all-reduce(%x), {OVER}, to_apply=%sum\n"
        f"  %n = bf16[32,8] convert(%r), {ASKED_FOR}\n  ROOT %y = f32[32,8] negate(%r)"
    )
    assert told_of(entry) == []


def test_f32_that_the_layout_asks_for_is_not_told():
    entry = (
        f"  %n = bf16[32,8] parameter(1)\n  %w = f32[32,8] convert(%n), {ASKED_FOR}\n"
        f"  ROOT %r = f32[32,8] all-reduce(%w), {OVER}, to_apply=%sum"
    )
    assert len(told_of(entry)) == 1
    assert told_of(entry, expected=[row("all-reduce", 1024)]) == []


def test_what_cpus_widen_is_told_once_for_each_operation_and_axes(mesh):
    text = programs.compile_manual(programs.each_kind, mesh, jnp.bfloat16)
    found = told(text, MESH_AXES)
    assert len(found) == len(set(found)) == 6
    size = 2 * 32 * 32 * 4
    assert found[0] == (
        f"all-gather over data of {size:,} bytes of f32, once a step (jit(each_kind)/shard_map/"
        "all_gather), where bf16 was asked for: XLA widened it for this target; 4,096 bytes would "
        "do"
    )


@pytest.mark.parametrize("version", ["jax0_10", "jax0_12"])
@pytest.mark.parametrize("name", ["each_kind", "nested_scans", "branches", "mlp_gradients"])
def test_there_is_nothing_to_tell_of_plain_programs_on_gpus(version, name):
    assert told(gpu_text(version, name), MESH_AXES) == []


def test_f32_that_users_convert_around_a_collective_is_told_in_a_compiled_program(mesh):
    def wide(x, i):
        return lax.all_gather(x.astype(jnp.float32), "tensor", tiled=True).astype(jnp.bfloat16)

    (text,) = told(programs.compile_manual(wide, mesh, jnp.bfloat16), MESH_AXES)
    assert "all_gather) sends 16,384 bytes that were bf16 just before" in text


# What a layout asks for


def gathered(rows: int, count: int = 1) -> str:
    """Lines that gather f32[4 rows, 8] over tensor, `count` times."""
    return "\n".join(
        f"  %a{rows}_{i} = f32[{rows},8] slice(%x), slice={{}}\n"
        f"  %g{rows}_{i} = f32[{4 * rows},8] all-gather(%a{rows}_{i}), {OVER}, "
        f"dimensions={{0}}, {BY_JAX}"
        for i in range(count)
    )


def test_what_the_layout_does_not_ask_for_is_told_the_largest_first():
    entry = "\n".join([gathered(16, 3), gathered(32), gathered(8)])
    expected = [row("all-gather", 4096), row("all-gather", 2048, ("data",))]
    name = "(jit(step)/shard_map/all_gather)"
    asks = "is more than the layout asks for; it asks for 4,096 bytes"
    assert told_of(entry, expected=expected) == [
        f"all-gather over tensor of 2,048 bytes of f32, once a step {name} {asks}; and 2 more like "
        "it, 6,144 bytes a step in all",
        f"all-gather over tensor of 1,024 bytes of f32, once a step {name} {asks}",
    ]


def test_an_operation_or_axis_that_the_layout_does_not_ask_for_at_all_is_told():
    (text,) = told_of(gathered(32), expected=[row("all-gather", 4096, ("data",))])
    assert text.endswith("asks for; it asks for no all-gather over tensor")


def test_tiny_collectives_are_told_together():
    entry = "\n".join(gathered(rows) for rows in (1, 2, 4))
    assert told_of(entry, expected=[]) == [
        "3 collectives of less than 1024 bytes a step that the layout does not ask for: 896 bytes "
        "a step in all"
    ]
    assert told_of(entry) == []


def test_combined_collectives_are_compared_piece_by_piece():
    joined = (
        "%join (a: f32[32,8], b: f32[8,8]) -> f32[320] {\n  %a = f32[32,8] parameter(0)\n"
        "  %b = f32[8,8] parameter(1)\n  %c = f32[256] bitcast(%a)\n  %d = f32[64] bitcast(%b)\n"
        "  ROOT %j = f32[320] concatenate(%c, %d), dimensions={0}\n}\n"
    )
    reduced = f"{OVER}, to_apply=%sum"
    several = (
        "  %z = f32[8,8] slice(%x), slice={}\n"
        f"  ROOT %r = (f32[32,8], f32[8,8]) all-reduce(%x, %z), {reduced}"
    )
    one = (
        "  %z = f32[8,8] slice(%x), slice={}\n"
        "  %j = f32[320] fusion(%x, %z), kind=kLoop, calls=%join\n"
        f"  ROOT %r = f32[320] all-reduce(%j), {reduced}"
    )
    both = [row("all-reduce", 1024), row("all-reduce", 256)]
    for entry in (several, one):
        assert told_of(entry, joined, expected=both) == []
        (text,) = told_of(entry, joined, expected=both[:1])
        assert text.endswith("of 1,280 bytes of f32, once a step (r) is more than the layout asks "
                             "for; it asks for 1,024 bytes")  # fmt: skip


def rows_of(layout: jp.Layout) -> list[Transfer]:
    model = model_shapes("llama")
    return [
        *costs.parameter_traffic(model, layout), *costs.activation_traffic(model, layout, 32, 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings", [dict(data=8, zero=3), dict(data=2, tensor=4, zero=1, microbatches=4)]
)
def test_there_is_nothing_to_tell_of_a_layout_and_the_program_that_was_compiled_for_it(settings):
    layout = jp.Layout(precision="fp32", **settings)
    run = compiled("llama", layout)
    assert find(run.text, run.collectives, expected=rows_of(layout)) == []


def test_whole_parameters_that_are_gathered_against_the_layout_are_told():
    layout = jp.Layout(precision="fp32", data=8, zero=1)
    run = compiled("llama", layout)
    rows = rows_of(jp.Layout(precision="fp32", data=8, zero=3))
    # ZeRO 1 gathers the four layers of a parameter at once, ZeRO 3 each by itself.
    start = f"all-gather over data of {4 * 64 * 32 * 4:,} bytes of f32, once a step "
    told = find(run.text, run.collectives, expected=rows)
    (ffn,) = [text for text in told if text.startswith(start)]
    assert "is more than the layout asks for; it asks for 8,192 or " in ffn
    assert find(run.text, run.collectives, expected=rows_of(layout)) == []


# What the readers could not map


def test_what_the_readers_could_not_map_is_passed_on_once():
    pairs = "replica_groups={{0,1},{2,3},{4,6},{5,7}}, to_apply=%sum"
    lines = [f"  %r{i} = f32[32,8] all-reduce(%x), {pairs}" for i in range(3)]
    (text,) = told_of("\n".join(lines))
    assert text.startswith("all-reduce over ? of 1,024 bytes of f32, once a step (r0): groups {{0,")
    assert text.endswith("and 2 more like it, 3,072 bytes a step in all")


def test_collectives_without_communication_are_not_told():
    assert told_of("  ROOT %r = f32[128,8] all-gather(%x), replica_groups=[8,1]<=[8]") == []
