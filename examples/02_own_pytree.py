"""Your own model and loop, a plain dict of arrays: ZeRO 1 by saying where the state lives.

Run:  python examples/02_own_pytree.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar as jp

jp.emulate_devices(8)
mesh = jp.make_mesh(jp.Layout(data=8))
whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
tx = optax.adamw(1e-2)


def init(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(a, (256, 32)),
        "up": jax.random.normal(b, (32, 128)) / 32**0.5,
        "down": jax.random.normal(c, (128, 256)) / 128**0.5,
    }


def loss_fn(params, batch):
    x = params["embed"][batch["tokens"]]
    logits = jax.nn.gelu(x @ params["up"]) @ params["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


params = jp.shard(init(jax.random.key(0)), whole)
shardings = jp.zero_shardings(jax.eval_shape(tx.init, params), mesh)  # split over "data"
opt_state = jax.jit(tx.init, out_shardings=shardings)(params)


@jax.jit(donate_argnums=(0, 1), out_shardings=(whole, shardings, None))
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for i, batch in enumerate(jp.data.batches("builtin", global_batch=64, seq_len=32, steps=30)):
    params, opt_state, loss = step(params, opt_state, jp.shard(batch, rows))
    if (i + 1) % 10 == 0:
        print(f"step {i + 1}: loss {loss:.3f}")

total = sum(x.nbytes for x in jax.tree.leaves(opt_state))
here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(opt_state))
print(f"optimizer state: {total:,} bytes, {here:,} on each of {mesh.size} devices")
print(f"whole on every device: {', '.join(jp.whole_leaves(opt_state, shardings))}")
