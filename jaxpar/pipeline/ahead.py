"""Forward and backward of a stack whose weights are fetched one block ahead, behind the compute.

The one idea: the scan carries the weights of the block that it runs, and the body fetches those of
the next one, on which nothing in it depends. While the last block computes, its own weights come
once more, for the start of the backward pass; so as many fetches run as without. Two blocks'
weights live.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar._jax_compat import varying_axes
from jaxpar.pipeline.stage import (
    Stack,
    Structure,
    add_at,
    block_backward,
    block_forward,
    layer_at,
)


def forward(stack: Stack, layers: list, x: jax.Array, batch: dict, structure: Structure):
    """Runs all blocks. Returns (x, kept with a leading layers dim, the last block's weights)."""
    last = layers[0].shape[0] - 1

    def body(carry, i):
        x, weights = carry
        following = stack.fetch(layer_at(layers, jnp.minimum(i + 1, last)))
        y, kept = block_forward(stack, weights, x, {**batch, "layer": i}, structure)
        return _together(y, following), kept

    first = _once(x, layer_at(layers, 0))  # else it is fetched once for all microbatches, and stays
    (x, weights), kept = lax.scan(body, (x, stack.fetch(first)), _numbers(last + 1))
    return x, kept, weights


def backward(
    stack: Stack,
    layers: list,
    kept: list,
    weights: list,
    dx: jax.Array,
    batch: dict,
    sums: list,
    structure: Structure,
):
    """Goes back through the blocks, from the last block's weights. Returns (dx, sums)."""
    last = layers[0].shape[0] - 1

    def block(dx, weights, i):
        shared = {**batch, "layer": i}
        return block_backward(stack, weights, layer_at(kept, i), dx, shared, structure)

    def body(carry, steps):
        dx, weights, sums = carry
        i = last - steps
        following = stack.fetch(layer_at(layers, i - 1))
        dx, gradients = block(dx, weights, i)
        pairs = [lax.optimization_barrier(p) for p in zip(gradients, following, strict=True)]
        gradients, following = (list(part) for part in zip(*pairs, strict=True))
        return (dx, following, add_at(sums, stack.give_back(gradients), i)), None

    (dx, weights, sums), _ = lax.scan(body, (dx, weights, sums), _numbers(last))
    dx, gradients = block(dx, weights, jnp.int32(0))
    return dx, add_at(sums, stack.give_back(gradients), 0)


def _once(x: jax.Array, weights: list) -> list:
    """`weights`, used only once x is there."""
    return [lax.optimization_barrier((w, x))[0] for w in weights]


def _together(x: jax.Array, weights: list) -> tuple[jax.Array, list]:
    """x and `weights`, each used only once all are there. A barrier gives all that it joins the
    type of the most different, so weights that differ on more axes than x wait for it alone."""
    axes = varying_axes(x)
    joined = [w for w in weights if varying_axes(w) <= axes]
    x, joined = lax.optimization_barrier((x, joined))
    rest = iter(joined)
    alone = lambda w: _once(x, [w])[0]  # noqa: E731
    return x, [next(rest) if varying_axes(w) <= axes else alone(w) for w in weights]


def _numbers(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)
