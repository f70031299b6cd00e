"""Dropout whose mask depends on (seed, step, layer, site, row, position) and on nothing else.

The caller gives one key per step; whoever holds a token, under whatever layout, microbatch or
recomputation, draws the same bits for it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.nn.parallel import local_columns


def dropout(x: Float[Array, "B S D"], rate: float, batch: dict, site: int) -> Float[Array, "B S D"]:
    """Zeroes features with probability `rate` and scales the rest by 1 / (1 - rate).

    The identity where the batch carries no `dropout_key` (evaluation). `site` tells apart the
    places of one layer; `batch["layer"]` the layers, `batch["rows"]` [B] the rows of the global
    batch.
    """
    if rate == 0.0 or "dropout_key" not in batch:
        return x
    key = jax.random.fold_in(batch["dropout_key"], site)
    key = jax.random.fold_in(key, batch.get("layer", 0))
    rows = batch.get("rows", jnp.arange(x.shape[0]))

    def token_mask(row, column):
        bits = jax.random.fold_in(jax.random.fold_in(key, row), column)
        return jax.random.bernoulli(bits, 1.0 - rate, (x.shape[-1],))

    columns = jnp.broadcast_to(local_columns(batch, x.shape[1]), x.shape[:2])
    keep = jax.vmap(jax.vmap(token_mask, in_axes=(None, 0)))(rows, columns)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
