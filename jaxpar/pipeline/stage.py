"""Forward and backward of a stack of blocks, written out.

The forward pass keeps what `jax.vjp` of each block needs, without the weights and without what
all layers share; the backward pass puts those back in. So what is kept is exactly what the remat
policy says, weights gathered for one block are dropped after it, and gradients go into their fp32
accumulators layer by layer.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.nn.parallel import vary_like

POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "block": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of blocks and how its weights come and its gradients go.

    `block(weights, x, batch) -> x`, with weights a list of leaves of one layer. `fetch(leaves)`
    makes weights of one layer's stored leaves, `give_back(gradients)` is the reverse for the
    gradients; each is the identity where that happens once a step, outside.
    """

    block: Callable
    fetch: Callable
    give_back: Callable
    remat: str = "none"


def forward(stack: Stack, layers: list, x: jax.Array, batch: dict, first_layer=0):
    """Runs all blocks. Returns (x, kept): kept is a list of arrays with a leading layers dim,
    and the structure `backward` needs."""
    structure = {}

    def body(x, item):
        stored, layer = item
        weights = stack.fetch(stored)
        shared = _shared(batch, layer)
        y, pullback = jax.vjp(lambda w, x: _block(stack, shared)(w, x), weights, x)
        leaves, tree = jax.tree.flatten(pullback)
        sources = [_source(leaf, weights, jax.tree.leaves(shared)) for leaf in leaves]
        structure["tree"], structure["sources"] = tree, sources
        kept = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        return y, [_offload(a) for a in kept] if stack.remat == "offload" else kept

    x, kept = lax.scan(body, x, (layers, _layer_numbers(layers, first_layer)))
    return x, (kept, structure)


def backward(stack: Stack, layers: list, kept, dx: jax.Array, batch: dict, sums: list,
             first_layer=0):  # fmt: skip
    """Goes back through all blocks. Returns (dx, sums): sums with each layer's gradients added."""
    kept, structure = kept

    def body(carry, item):
        dx, sums = carry
        stored, arrays, layer, place = item
        if stack.remat == "offload":
            arrays = [_bring_back(a) for a in arrays]
        weights = stack.fetch(stored)
        shared = jax.tree.leaves(_shared(batch, layer))
        rest = iter(arrays)
        leaves = [
            next(rest) if s is None else (weights if s[0] == "weight" else shared)[s[1]]
            for s in structure["sources"]
        ]
        pullback = jax.tree.unflatten(structure["tree"], leaves)
        gradients, dx = pullback(dx)
        gradients = stack.give_back(gradients)
        return (dx, [_add_at(s, g, place) for s, g in zip(sums, gradients, strict=True)]), None

    numbers = _layer_numbers(layers, first_layer)
    places = jnp.arange(numbers.shape[0])
    (dx, sums), _ = lax.scan(body, (dx, sums), (layers, kept, numbers, places), reverse=True)
    return dx, sums


def apply(stack: Stack, layers: list, x: jax.Array, batch: dict, first_layer=0) -> jax.Array:
    """Runs all blocks and keeps nothing (evaluation)."""

    def body(x, item):
        stored, layer = item
        return stack.block(stack.fetch(stored), x, _shared(batch, layer)), None

    return lax.scan(body, x, (layers, _layer_numbers(layers, first_layer)))[0]


def zeros_for(weights: list) -> list:
    """fp32 zeros with the shapes of `weights`, as different over the mesh as they are."""
    return [vary_like(jnp.zeros(w.shape, jnp.float32), w) for w in weights]


def _block(stack: Stack, shared: dict):
    def run(weights, x):
        return stack.block(weights, x, shared)

    if stack.remat == "none":
        return run
    return jax.checkpoint(run, policy=POLICIES[stack.remat])


def _layer_numbers(layers: list, first_layer) -> jax.Array:
    return first_layer + jnp.arange(layers[0].shape[0], dtype=jnp.int32)


def _shared(batch: dict, layer) -> dict:
    return {**batch, "layer": layer}


def _source(leaf, weights, shared):
    for kind, arrays in (("weight", weights), ("shared", shared)):
        for i, array in enumerate(arrays):
            if leaf is array:
                return kind, i
    return None


def _add_at(total: jax.Array, value: jax.Array, place) -> jax.Array:
    row = lax.dynamic_index_in_dim(total, place, keepdims=False) + value.astype(jnp.float32)
    return lax.dynamic_update_index_in_dim(total, row, place, axis=0)


def _offload(x):
    return jax.device_put(x, jax.memory.Space.Host)


def _bring_back(x):
    return jax.device_put(x, jax.memory.Space.Device)
