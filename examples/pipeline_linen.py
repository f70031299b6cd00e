"""The pipeline for a flax linen model: its modules as functions, its variables as the pytree."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

jp.emulate_devices(8)
mesh = jp.make_mesh(jp.Layout(pipe=4, data=2))
VOCAB, WIDTH, LAYERS = 32, 64, 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(h)))


embedding, one_block, head = nn.Embed(VOCAB, WIDTH), Block(), nn.Dense(VOCAB)


def init(key):
    ke, kl, kh = jax.random.split(key, 3)
    x = jnp.zeros((1, 1, WIDTH))
    return {
        "embed": embedding.init(ke, jnp.zeros((1, 1), jnp.int32)),
        "layers": jax.vmap(lambda k: one_block.init(k, x))(jax.random.split(kl, LAYERS)),
        "head": head.init(kh, x),
    }


def head_loss(params, x, batch):
    logits = head.apply(params["head"], x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


grad_fn = jp.pipeline.value_and_grad(
    lambda params, batch: embedding.apply(params["embed"], batch["tokens"]),
    lambda layer, x, batch: one_block.apply(layer, x),
    head_loss,
    mesh=mesh,
    schedule="interleaved",
    chunks=2,
    microbatches=4,
)
tx = optax.adam(3e-3)


@jax.jit
def step(params, opt_state, batch):
    loss, grads = grad_fn(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params = init(jax.random.key(0))
opt_state = tx.init(params)
rng = np.random.default_rng(0)
for i in range(20):
    tokens = rng.integers(0, VOCAB, (16, 8), dtype=np.int32)
    weights = np.ones(tokens.shape, np.float32)
    batch = {"tokens": tokens, "targets": (tokens * 5 + 3) % VOCAB, "weights": weights}
    params, opt_state, loss = step(params, opt_state, batch)
    if i % 5 == 0 or i == 19:
        print(f"step {i}: loss {loss:.3f}")
