"""The token table, split over the vocabulary; used to look tokens up and as the output head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.nn.parallel import (
    axis_index,
    gradient_of,
    settings,
    sum_partial,
    vary_like,
    zeros_after,
)
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
        x = sum_partial(look_up(table, jnp.where(mine, row, -1)), batch)
        others = tuple(a for a in settings(batch).vocab_axes if a != "tensor")
        return lax.psum(x, others) if others else x


@jax.custom_vjp
def look_up(table: Float[Array, "v D"], rows: Int[Array, "b t"]) -> Float[Array, "b t D"]:
    """table[rows], 0 where a row is negative.

    The gradient of a row is summed over its tokens in fp32 and rounded once: a frequent token has
    thousands of them in a microbatch, and a bf16 sum stands still after a few hundred.
    """
    found = jnp.take(table, jnp.maximum(rows, 0), axis=0)
    return jnp.where(rows[..., None] >= 0, found, 0)


def _forward(table, rows):
    return look_up(table, rows), (table, rows)


def _backward(saved, dx):
    table, rows = saved
    dx = jnp.where(rows[..., None] >= 0, dx, 0).astype(jnp.float32)
    d_table = vary_like(zeros_after(dx, table.shape, jnp.float32), table)
    return gradient_of(table, d_table.at[jnp.maximum(rows, 0)].add(dx)), None


look_up.defvjp(_forward, _backward)
