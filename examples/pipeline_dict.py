"""The pipeline for plain functions and a dict of arrays: no jaxpar model, no class."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

jp.emulate_devices(8)
mesh = jp.make_mesh(jp.Layout(pipe=4, data=2))
VOCAB, WIDTH, LAYERS = 32, 64, 6


def embed(params, batch):
    return params["table"][batch["tokens"]]


def block(layer, x, batch):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def head_loss(params, x, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def init(key):
    keys = jax.random.split(key, 4)
    draw = lambda key, *shape: 0.1 * jax.random.normal(key, shape)  # noqa: E731
    layers = {"up": draw(keys[1], LAYERS, WIDTH, 128), "down": draw(keys[2], LAYERS, 128, WIDTH)}
    table, head = draw(keys[0], VOCAB, WIDTH), draw(keys[3], WIDTH, VOCAB)
    return {"table": table, "layers": layers, "head": head}


grad_fn = jp.pipeline.value_and_grad(
    embed, block, head_loss, mesh=mesh, schedule="1f1b", microbatches=4
)
tx = optax.adam(1e-2)


@jax.jit
def step(params, opt_state, batch):
    loss, grads = grad_fn(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params = init(jax.random.key(0))
opt_state = tx.init(params)
rng = np.random.default_rng(0)
for i in range(20):
    tokens = rng.integers(0, VOCAB, (16, 9), dtype=np.int32)
    targets = (tokens * 5 + 3) % VOCAB  # something to learn
    batch = {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}
    params, opt_state, loss = step(params, opt_state, batch)
    if i % 5 == 0 or i == 19:
        print(f"step {i}: loss {loss:.3f}")
