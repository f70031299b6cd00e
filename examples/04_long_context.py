"""Long rows: a model whose rows are split over devices, and `jp.attention` alone in your own code.

Run:  python examples/04_long_context.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.models import llama

jp.emulate_devices(8)  # on a cluster: jp.initialize()

# a model: each row is split over 4 devices, evenly in each of the documents that are packed in it
layout = jp.Layout(context=4, data=2, context_order="document", precision="fp32")
tx = optax.adamw(3e-3)


def init(key):
    model = llama.Llama(llama.tiny(), rngs=nnx.Rngs(key))
    return model, tx.init(model)


plan = jp.make_plan(layout, init)
train_step = plan.train_step(tx, clip_norm=1.0)
state = plan.init(jax.random.key(0))
batches = jp.data.batches("builtin", plan, global_batch=4, seq_len=1024, steps=3)
for i, batch in enumerate(batches):
    documents = int(batch["segment_ids"].max(axis=1).sum())
    state, metrics = train_step(state, batch)
    print(f"step {i + 1}: loss {metrics['loss']:.3f} on 4 rows with {documents} documents")

# attention alone, on a mesh of your own: whole arrays in, whole arrays out
mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((1, 1024, n, 16), np.float32)) for n in (8, 4, 4))
segment_ids = jnp.asarray(np.repeat([[0, 1, 2]], (300, 500, 224), axis=1))  # three documents
alone = jp.attention(q, k, v, segment_ids=segment_ids)  # no mesh: on one device
on_mesh = jax.jit(functools.partial(jp.attention, mesh=mesh, axis="seq", variant="ring"))
np.testing.assert_allclose(on_mesh(q, k, v, segment_ids=segment_ids), alone, atol=1e-5)


# the same inside a shard_map of your own, where each device holds its part of the row
@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
def mine(q, k, v, segment_ids):
    return jp.attention(q, k, v, segment_ids=segment_ids, axis="seq", variant="allgather")


np.testing.assert_allclose(mine(q, k, v, segment_ids), alone, atol=1e-5)
print("attention on 8 devices agrees with one device's")
