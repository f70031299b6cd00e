"""Programs that XLA compiled: for emulated CPU devices here, for GPUs in `hlo_samples/*.txt`.

All numbers are worked out by hand from the programs in `hlo_samples/programs.py`, whose arrays are
[32, 32] on each of 2 x 4 devices.
"""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from hlo_samples import programs
from hlo_samples.programs import MESH_AXES
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.cluster import hlo

if jax.config.jax_num_cpu_devices != 8:
    jax.config.update("jax_num_cpu_devices", 8)

GPU_VERSIONS = ("jax0_10", "jax0_12")
F32, BF16 = 32 * 32 * 4, 32 * 32 * 2
T, D, BOTH = ("tensor",), ("data",), ("data", "tensor")


@pytest.fixture(scope="module")
def mesh():
    return programs.make_mesh(jax.devices("cpu"))


def gpu_text(version: str, name: str) -> str:
    return (pathlib.Path(programs.__file__).parent / f"gpu_{version}_{name}.txt").read_text()


def targets(mesh, name: str, dtype=jnp.float32) -> dict[str, str]:
    """The text of one program for the CPU, by this JAX, and for GPUs, by both versions."""
    texts = {version: gpu_text(version, name) for version in GPU_VERSIONS}
    return {"cpu": programs.compile_manual(programs.MANUAL[name], mesh, dtype), **texts}


def asked(text: str) -> dict:
    """(op, axes) -> payload bytes per step, in the types that the program asked for."""
    sums: dict = {}
    for item in hlo.collectives(text, MESH_AXES):
        assert item.warning == ""
        key = item.op, item.axes
        sums[key] = sums.get(key, 0) + item.count * item.asked_bytes
    return sums


def test_every_kind_of_collective_has_the_same_bytes_on_cpu_and_gpu(mesh):
    expected = {
        ("all-reduce", T): BF16,
        ("reduce-scatter", T): BF16,
        ("all-gather", D): 2 * BF16,
        ("collective-permute", T): BF16,
        ("all-to-all", T): BF16,
        ("all-reduce", BOTH): BF16,
    }
    for text in targets(mesh, "each_kind", jnp.bfloat16).values():
        assert asked(text) == expected


def test_on_cpu_bf16_is_sent_as_f32_and_named_so_and_on_gpu_it_is_not(mesh):
    texts = targets(mesh, "each_kind", jnp.bfloat16)
    for item in hlo.collectives(texts.pop("cpu"), MESH_AXES):
        assert (item.dtype, item.promoted_from) == ("f32", "bf16")
        assert item.bytes == 2 * item.asked_bytes
    for text in texts.values():
        for item in hlo.collectives(text, MESH_AXES):
            assert (item.dtype, item.promoted_from) == ("bf16", None)


def test_f32_that_the_program_asked_for_is_not_called_promoted(mesh):
    def wide(x, i):
        y = lax.all_gather(x.astype(jnp.float32), "tensor", tiled=True).astype(jnp.bfloat16)
        z = lax.psum(x.astype(jnp.float32), "data").astype(jnp.bfloat16)
        w = lax.ppermute(x.astype(jnp.float32), "tensor", programs.RING)
        return y, z, w

    text = programs.compile_manual(wide, mesh, jnp.bfloat16)
    found = hlo.collectives(text, MESH_AXES)
    assert sorted(item.op for item in found) == ["all-gather", "all-reduce", "collective-permute"]
    assert all(item.dtype == "f32" and item.promoted_from is None for item in found)


def test_bf16_that_is_used_as_f32_after_a_gather_is_called_promoted(mesh):
    def narrow(x, i):
        return jnp.sin(lax.all_gather(x, "tensor", tiled=True).astype(jnp.float32))

    (found,) = hlo.collectives(programs.compile_manual(narrow, mesh, jnp.bfloat16), MESH_AXES)
    assert (found.promoted_from, found.asked_bytes) == ("bf16", 4 * BF16)


def test_nested_scans_multiply_their_trip_counts(mesh):
    expected = {
        ("reduce-scatter", T): (15, 15 * F32, 15 * F32 * 3 // 4),
        ("all-gather", T): (15, 15 * F32, 15 * F32 * 3 // 4),
        ("all-reduce", D): (5, 5 * F32, 5 * F32),
    }
    for text in targets(mesh, "nested_scans").values():
        assert hlo.by_axis(hlo.collectives(text, MESH_AXES)) == expected


def test_trip_counts_worked_out_agree_with_those_that_xla_wrote(mesh):
    for text in targets(mesh, "nested_scans").values():
        without = text.replace('"known_trip_count"', '"other"')
        assert without != text
        assert hlo.collectives(without, MESH_AXES) == hlo.collectives(text, MESH_AXES)


def test_combined_sums_keep_the_bytes_of_each(mesh):
    texts = targets(mesh, "combined")
    (together,) = hlo.collectives(texts["cpu"], MESH_AXES)
    assert [buffer.bytes for buffer in together.buffers] == [F32, 3 * 32 * 4, F32]
    assert [buffer.promoted_from for buffer in together.buffers] == [None, None, "bf16"]
    for text in texts.values():
        assert asked(text) == {("all-reduce", T): F32 + 3 * 32 * 4 + BF16}


def test_branches_are_marked_and_take_the_given_share(mesh):
    for text in targets(mesh, "branches").values():
        found = hlo.collectives(
            text, MESH_AXES, branch_share=lambda _, branch: (0.5, 0, 0.25)[branch]
        )
        assert all(item.in_conditional for item in found)
        assert hlo.by_axis(found) == {
            ("all-reduce", T): (0.5, 0.5 * F32, 0.5 * F32 * 3 / 2),
            ("collective-permute", D): (0.25, 0.25 * F32, 0.25 * F32),
        }


def test_a_loop_bounded_by_an_argument_is_reported(mesh):
    for text in targets(mesh, "endless").values():
        (found,) = hlo.collectives(text, MESH_AXES)
        assert found.count is None and "is not known" in found.warning
        (loop,) = {item.removeprefix("%") for item in found.warning.split() if "while" in item}
        (found,) = hlo.collectives(text, MESH_AXES, trip_counts={loop: 6})
        assert (found.count, found.total_bytes, found.warning) == (6, 6 * F32, "")


def test_what_the_partitioner_adds_is_found_on_cpu_and_gpu(mesh):
    # Per device x[32, 128], up[128, 64], down[64, 128]: the product with down is summed over
    # tensor, both gradients over data.
    texts = [gpu_text(version, "mlp_gradients") for version in GPU_VERSIONS]
    compiled = programs.compile_automatic(programs.mlp_gradients, mesh, jnp.bfloat16, *programs.MLP)
    for text in [compiled, *texts]:
        assert asked(text) == {("all-reduce", T): 32 * 128 * 2, ("all-reduce", D): 2 * 128 * 64 * 2}
        # Five products of the same size: two forward, three backward (x needs no gradient).
        assert hlo.flops(text) == hlo.Flops(dots=5 * 2 * 32 * 128 * 64)


@pytest.mark.parametrize("version", GPU_VERSIONS)
def test_a_ragged_exchange_is_found_on_gpu(version):
    (found,) = hlo.collectives(gpu_text(version, "ragged"), MESH_AXES)
    assert (found.op, found.axes, found.bytes) == ("ragged-all-to-all", T, F32)


def test_a_product_in_a_scan_counts_once_per_iteration(mesh):
    def chain(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=6)[0].sum()

    shapes = ((16, 32), P("data")), ((32, 32), P())
    once = 2 * 8 * 32 * 32
    forward = programs.compile_automatic(chain, mesh, jnp.float32, *shapes)
    assert hlo.flops(forward).total == 6 * once
    gradient = programs.compile_automatic(
        jax.grad(chain, argnums=(0, 1)), mesh, jnp.float32, *shapes
    )
    assert hlo.flops(gradient).total == 3 * 6 * once


def test_batched_products_and_convolutions_count_what_they_do(mesh):
    def batched(a, b):
        return jnp.einsum("bik,bkj->bij", a, b)

    shapes = ((4, 8, 16), P("data")), ((4, 16, 32), P("data"))
    text = programs.compile_automatic(batched, mesh, jnp.float32, *shapes)
    assert hlo.flops(text) == hlo.Flops(dots=2 * 2 * 8 * 16 * 32)

    def convolution(image, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=dims)

    shapes = ((4, 8, 8, 3), P()), ((3, 3, 3, 5), P())
    text = programs.compile_automatic(convolution, mesh, jnp.float32, *shapes)
    # Four results a side, three positions each, but the last one reaches one beyond the image.
    assert hlo.flops(text) == hlo.Flops(convolutions=2 * 4 * 5 * 3 * 11 * 11)


@pytest.mark.parametrize("version", GPU_VERSIONS)
def test_cublas_and_cudnn_calls_count_what_they_do(version):
    text = gpu_text(version, "products")
    assert "__cublas$lt$matmul" in text
    assert hlo.flops(text) == hlo.Flops(dots=2 * 2 * 2048**3)
    text = gpu_text(version, "attention_gradients")
    # Two products forward, five backward, over scores [2, 8, 128, 128] with 64 per head.
    work = 7 * 2 * (2 * 8 * 128 * 128) * 64
    assert hlo.flops(text) == hlo.Flops(attention=work, causal_attention=work)
    assert hlo.flops(text).total == work


def test_programs_have_as_many_lines_as_instructions(mesh):
    for text in targets(mesh, "nested_scans").values():
        computations = hlo.parse(text).computations.values()
        assert sum(len(c.instructions) for c in computations) == hlo.instruction_lines(text)
