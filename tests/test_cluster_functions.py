"""Programs of one's own, without jaxpar's models, compiled for GPUs that are not here."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.cluster.compiler import compile
from jaxpar.cluster.target import Target

H100X8 = Target(gpu="h100", nodes=2, gpus_per_node=4)


def product(mesh):
    """x[64, 32] over data and w[32, 16] over tensor, as shapes on a mesh."""
    return tuple(
        jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))
        for dims, spec in (((64, 32), P("data")), ((32, 16), P(None, "tensor")))
    )


def cpu_mesh(devices=None):
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(
        (4, 2), ("data", "tensor"), devices=devices,
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )  # fmt: skip


@jax.jit
def norm_of_product(x, w):
    return jnp.sum((x @ w) ** 2)


def test_a_function_of_ones_own_is_moved_to_the_targets_devices():
    report = compile(norm_of_product, H100X8, *product(cpu_mesh()))
    assert report.flops == 2 * 64 * 32 * 16 // 8
    assert report.memory.arguments == (64 * 32 // 4 + 32 * 16 // 2) * 4
    assert report.by_axis["all-reduce", "data+tensor"].total_bytes == 4
    assert report.title == "norm_of_product"
    named = {
        (array.name, array.shape) for array in report.memory.arrays if array.kind == "argument"
    }
    assert named == {("x", "f32[16,32]"), ("w", "f32[32,8]")}
    there = compile(norm_of_product, H100X8, *product(cpu_mesh(H100X8.devices())))
    assert there.text == report.text and there.collectives == report.collectives


def test_real_arrays_and_plain_values_are_arguments_too():
    x, w = (jax.device_put(jnp.zeros(s.shape), s.sharding) for s in product(cpu_mesh()))
    scaled = jax.jit(lambda x, w, scale, power: jnp.sum((x @ w) ** power) * scale,
                     static_argnums=3)  # fmt: skip
    report = compile(scaled, H100X8, x, w, jnp.float32(2), 2)
    assert report.flops == 2 * 64 * 32 * 16 // 8


def test_nodes_follow_the_order_of_devices_in_the_mesh():
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # pairs along tensor on two nodes, data pairwise inside
    mesh = Mesh([[jax.devices()[i] for i in order[j : j + 2]] for j in range(0, 8, 2)],
                ("data", "tensor"))  # fmt: skip
    tensor_sum = jax.jit(jnp.sum, in_shardings=None)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, "tensor")))
    (row,) = compile(tensor_sum, H100X8, x).collectives
    assert row.axis == "tensor" and row.crosses_nodes
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    (row,) = compile(tensor_sum, H100X8, x).collectives
    assert row.axis == "data" and not row.crosses_nodes


def test_one_device_needs_no_sharding():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    report = compile(jax.jit(jnp.dot), Target(gpu="a100-40gb", gpus_per_node=1), x, x)
    assert report.flops == 2 * 8**3 and report.collectives == () and report.fits
    assert report.memory.device == 42_331_013_120


def test_a_loop_of_unknown_length_needs_its_trip_count():
    def repeat(x, n):
        return lax.fori_loop(0, n, lambda i, y: y @ y, x)

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    one = Target(gpus_per_node=1)
    report = compile(jax.jit(repeat), one, *args)
    assert report.flops is None
    (loop,) = report.flops_by.unknown_loops
    assert any(f"trip_counts={{{loop!r}: number}}" in text for text in report.warnings)
    again = compile(jax.jit(repeat), one, *args, trip_counts={loop: 10})
    assert again.flops == 10 * 2 * 8**3


def test_a_mesh_that_the_function_holds_on_to_is_told_in_a_sentence():
    mesh = cpu_mesh()

    @jax.jit
    def constrained(x, w):
        return lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data")))

    with pytest.raises(ValueError, match="build that mesh from target.devices()") as error:
        compile(constrained, H100X8, *product(mesh))
    assert "\n" not in str(error.value)


WRONG = {
    "not jitted": (lambda: compile(len, H100X8), "neither a Plan nor a jitted function"),
    "fewer devices": (
        lambda: compile(norm_of_product, Target(gpus_per_node=4), *product(cpu_mesh())),
        "the arguments' mesh data=4 x tensor=2 has 8 devices, and the target is 4 x h100-80gb",
    ),
    "no sharding": (
        lambda: compile(jax.jit(jnp.dot), H100X8, jnp.ones((2, 2)), jnp.ones((2, 2))),
        "no argument has a NamedSharding, and the target is 8 x h100-80gb",
    ),
    "two meshes": (
        lambda: compile(
            norm_of_product, H100X8, product(cpu_mesh())[0], product(cpu_mesh(H100X8.devices()))[1]
        ),
        "the arguments are on 2 meshes",
    ),
    "an optimizer for a function": (
        lambda: compile(norm_of_product, H100X8, *product(cpu_mesh()), tx=optax.sgd(0.1)),
        "tx, loss, clip_norm and across_hosts go with a Plan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence_before_anything_compiles(name):
    call, words = WRONG[name]
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_cached_program_is_compiled_again_for_its_dump(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    function = jax.jit(lambda x: jnp.sort(jnp.sin(x) @ x) @ x)
    try:
        for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
            jax.config.update(name, value)
        function.lower(x).compile()
        kinds = []
        for _ in range(2):
            memory = compile(function, Target(gpu="cpu", gpus_per_node=1), x).memory
            kinds.append({array.kind for array in memory.arrays})
        assert kinds == [{"argument", "temporary"}] * 2
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
