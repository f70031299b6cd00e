"""What a step needs and sends on 16 H100s, on a machine that has none.

    pip install -e '.[cluster]'
    python examples/03_cluster.py

A plan and a jitted function of one's own are compiled for two nodes of 8 GPUs; the report can be
printed, compared with another, and checked in one's own tests.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.models import llama

target = jp.cluster.Target(gpu="h100", nodes=2, gpus_per_node=8)
tx = optax.adamw(3e-4)
config = llama.preset("1b", num_layers=4)


def init(key):
    model = llama.Llama(config, rngs=nnx.Rngs(key))
    return model, tx.init(model)


def report_of(layout):
    plan = jp.make_plan(layout, init, mesh=target.mesh(layout))
    return jp.cluster.compile(plan, target, (32, 2048), tx=tx)


layout = jp.Layout(pipe=2, data=2, tensor=4, microbatches=8, remat="block")
report = report_of(layout)
print(report)
jp.testing.assert_fits(report, gib=12)

# four times more rows on each device instead of a pipeline
print(report.diff(report_of(jp.Layout(data=4, tensor=4, microbatches=4, remat="block"))))

# a function of one's own: x over data, w over tensor
mesh = target.mesh(jp.Layout(data=4, tensor=4))
x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
w = jax.ShapeDtypeStruct(
    (1024, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "tensor"))
)
own = jp.cluster.compile(jax.jit(lambda x, w: jnp.sum((x @ w).astype(jnp.float32))), target, x, w)
total = {"count": 1, "bytes": 4}
jp.testing.assert_collectives(own, {("all-reduce", "data+tensor"): total})
print(f"own function: {own.flops:,} operations per device, {own.memory.peak:,} bytes at the peak")
