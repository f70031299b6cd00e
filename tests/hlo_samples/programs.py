"""Small programs whose communication and operations are easy to work out by hand.

The tests compile them for emulated CPU devices and read the GPU text of the very same programs
from the .txt files here, so that they need no CUDA plugin. With `jax-cuda12-plugin` installed (and
`nvidia-cudnn-cu12`, for the attention), this command writes the files for the installed JAX:

    python tests/hlo_samples/programs.py
"""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HERE = pathlib.Path(__file__).parent
MESH_AXES = {"data": 2, "tensor": 4}
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def each_kind(x, i):
    """Every collective once; x[32, 32] per device."""
    a = lax.psum(x * 2, "tensor")
    b = lax.psum_scatter(x * 3, "tensor", tiled=True)
    c = lax.all_gather(x * 5, "data", tiled=True)
    d = lax.ppermute(x * 7, "tensor", RING)
    e = lax.all_to_all(x * 11, "tensor", 0, 1, tiled=True)
    f = lax.pmax(x * 13, ("data", "tensor"))
    return a, b, c, d, e, f


def nested_scans(x, i):
    """Five times: (three times: scatter and gather over tensor), then a sum over data."""

    def inner(c, _):
        part = lax.psum_scatter(c * c, "tensor", tiled=True)
        return c + lax.all_gather(part, "tensor", tiled=True), None

    def outer(c, _):
        c, _ = lax.scan(inner, c, None, length=3)
        return c + lax.psum(c, "data"), None

    return lax.scan(outer, x, None, length=5)[0]


def combined(x, i):
    """Three sums over the same axis, of [32, 32], [3, 32] and [32, 32] in bf16."""
    third = (x * 4).astype(jnp.bfloat16)
    return lax.psum(x * 2, "tensor"), lax.psum(x[:3] * 3, "tensor"), lax.psum(third, "tensor")


def branches(x, i):
    """A sum over tensor in the first branch, nothing in the second, a permute in the third."""
    return lax.switch(
        i[0],
        [
            lambda x: lax.psum(x, "tensor"),
            lambda x: x * 2,
            lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        ],
        x,
    )


def endless(x, i):
    """A loop whose trip count is an argument."""
    return lax.while_loop(
        lambda c: c[0] < i[0], lambda c: (c[0] + 1, lax.psum(c[1], "tensor")), (0, x)
    )[1]


def ragged(x, i):
    """One row to each of the four devices along tensor."""
    ones, rows = jnp.ones(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    return lax.ragged_all_to_all(x * 2, x, rows, ones, rows, ones, axis_name="tensor")


MANUAL = {f.__name__: f for f in (each_kind, nested_scans, combined, branches, endless)}


def mlp_gradients(x, up, down):
    """Gradients of a two-layer perceptron: x[B, D] up[D, F] down[F, D]."""
    return jax.grad(lambda x, up, down: jnp.sum((jnp.tanh(x @ up) @ down) ** 2), (1, 2))(
        x, up, down
    )


def attention_gradients(q, k, v):
    """cuDNN attention with a causal mask, forward and backward: q, k, v [B, T, N, H]."""

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def products(a, b):
    """gelu(a b + 1) b^T for square matrices."""
    return jax.nn.gelu(a @ b + jnp.ones(b.shape[1:], b.dtype)) @ b.T


def make_mesh(devices) -> Mesh:
    """The mesh of all programs here: 2 x 4 devices."""
    return Mesh(
        np.array(devices[:8]).reshape(2, 4), tuple(MESH_AXES), axis_types=(AxisType.Auto,) * 2
    )


def compile_manual(function, mesh: Mesh, dtype) -> str:
    """The HLO text of one of MANUAL, for x[64, 128] split over both axes: [32, 32] per device."""
    x = jax.ShapeDtypeStruct((64, 128), dtype, sharding=NamedSharding(mesh, P("data", "tensor")))
    i = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(mesh, P()))
    inside = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(P("data", "tensor"), P()),
        out_specs=P("data", "tensor"),
        check_vma=False,
    )
    return jax.jit(inside).lower(x, i).compile().as_text()


def compile_automatic(function, mesh: Mesh, dtype, *arrays) -> str:
    """The HLO text of a function whose arguments are given as (shape, spec)."""
    structs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in arrays
    ]
    return jax.jit(function).lower(*structs).compile().as_text()


MLP = (((64, 128), P("data")), ((128, 256), P(None, "tensor")), ((256, 128), P("tensor")))


def main() -> None:
    """Write the GPU texts."""
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    from jax.experimental import topologies

    def gpus(count):
        return topologies.get_topology_desc(
            platform="cuda", target_config=H100, topology=f"1x1x{count}"
        ).devices

    mesh = make_mesh(gpus(8))
    one = Mesh(np.array(gpus(1)), ("data",), axis_types=(AxisType.Auto,))
    bf16 = jnp.bfloat16
    texts = {
        name: compile_manual(function, mesh, bf16 if name == "each_kind" else jnp.float32)
        for name, function in {**MANUAL, "ragged": ragged}.items()
    }
    texts["mlp_gradients"] = compile_automatic(mlp_gradients, mesh, bf16, *MLP)
    heads, key_heads = ((2, 128, 8, 64), P()), ((2, 128, 4, 64), P())
    texts["attention_gradients"] = compile_automatic(
        attention_gradients, one, bf16, heads, key_heads, key_heads
    )
    square = ((2048, 2048), P())
    texts["products"] = compile_automatic(products, one, bf16, square, square)
    version = "_".join(jax.__version__.split(".")[:2])
    for name, text in texts.items():
        text = text.replace(str(HERE) + os.sep, "").replace(str(HERE), "")
        (HERE / f"gpu_jax{version}_{name}.txt").write_text(text + "\n" * (not text.endswith("\n")))


if __name__ == "__main__":
    main()
