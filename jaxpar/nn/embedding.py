"""The token table, split over the vocabulary; used to look tokens up and as the output head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.nn.parallel import axis_index, settings, sum_partial
from jaxpar.nn.params import normal, param


class Embedding(nnx.Module):
    """table[V, D], V split over `vocab_axes`; padding rows of a device's share are never used."""

    def __init__(self, vocab_size: int, embed_dim: int, *, key: jax.Array, std: float):
        self.table = param(normal(key, (vocab_size, embed_dim), std), ("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "B T"], batch: dict) -> Float[Array, "B S D"]:
        # table[v, D], tokens[b, t] -> partial [b, t, D]; summed over the vocabulary's axes
        table = self.table[...]
        row = tokens - axis_index(settings(batch).vocab_axes) * table.shape[0]
        mine = (row >= 0) & (row < table.shape[0])
        found = jnp.take(table, jnp.where(mine, row, 0), axis=0)
        x = sum_partial(jnp.where(mine[..., None], found, 0), batch)
        others = tuple(a for a in settings(batch).vocab_axes if a != "tensor")
        return lax.psum(x, others) if others else x
