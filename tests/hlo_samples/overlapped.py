"""A small program whose exchanges can hide behind products: its GPU text, as it was scheduled.

With `jax-cuda12-plugin` installed, this command writes the file for the installed JAX:

    python tests/hlo_samples/overlapped.py
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
MESH_AXES = {"pipe": 4}
SIZE, TICKS = 2048, 6
RIGHT = [(i, i + 1) for i in range(3)]
LEFT = [(i + 1, i) for i in range(3)]
OPTIONS = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}


def exchanges(x, w):
    """Ticks of a pipeline, [SIZE, SIZE] each: a gradient arrives during F, an activation during B.

    F is one product, B two. The sum after the ticks has nothing to hide behind.
    """

    def tick(carry, i):
        ring, dx, total = carry
        arrived = lax.ppermute(dx, "pipe", LEFT)
        with jax.named_scope("F"):
            y = jnp.tanh(ring[i % 2] @ w)
        sent = lax.ppermute(y, "pipe", RIGHT)
        with jax.named_scope("B"):
            dx = jnp.tanh(arrived @ w.T * y) @ w
        ring = lax.dynamic_update_index_in_dim(ring, sent, (i + 1) % 2, 0)
        return (ring, dx, total + dx), None

    with jax.named_scope("segment 0"):
        carry = jnp.stack([x, x]), x, x
        (_, _, total), _ = lax.scan(tick, carry, jnp.arange(TICKS))
    return lax.psum(total, "pipe")


def main() -> None:
    """Write the GPU text."""
    from jax.experimental import topologies

    from programs import H100

    devices = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x4"
    ).devices
    mesh = Mesh(np.array(devices), tuple(MESH_AXES), axis_types=(AxisType.Auto,))
    spec = P(None, "pipe")
    x, w = (
        jax.ShapeDtypeStruct((SIZE, columns), jnp.bfloat16, sharding=NamedSharding(mesh, s))
        for columns, s in ((4 * SIZE, spec), (SIZE, P()))
    )
    inside = jax.shard_map(
        exchanges, mesh=mesh, in_specs=(spec, P()), out_specs=P(), check_vma=False
    )
    text = jax.jit(inside).lower(x, w).compile(compiler_options=OPTIONS).as_text()
    text = text.replace(str(HERE) + os.sep, "").replace(str(HERE), "")
    version = "_".join(jax.__version__.split(".")[:2])
    (HERE / f"gpu_jax{version}_overlapped.txt").write_text(text + "\n" * (not text.endswith("\n")))


if __name__ == "__main__":
    main()
