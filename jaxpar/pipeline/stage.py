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
from jaxpar.pipeline import buffers
from jaxpar.pipeline.branch import when

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
    gradients; each is the identity where that happens once a step, outside. Remat "stage" keeps
    everything: its user runs the forward again.
    """

    block: Callable
    fetch: Callable
    give_back: Callable
    remat: str = "none"


@dataclasses.dataclass(frozen=True)
class Span:
    """The layers of a stack to run: places first .. first+size-1, of which `count` hold a layer.

    `number` is the model's number of the first of them. `count` None: all hold one.
    """

    size: int
    first: jax.Array | int = 0
    number: jax.Array | int = 0
    count: jax.Array | None = None


@dataclasses.dataclass
class Structure:
    """Where each residual of a block's vjp comes from; filled in when `forward` is traced."""

    tree: jax.tree_util.PyTreeDef | None = None
    sources: list | None = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring buffers [slots, layers, ...] of what is kept, and the slot that is meant."""

    arrays: list
    slot: jax.Array

    def write(self, arrays: list, values: list, i) -> list:
        """`arrays` with one layer's values in place."""
        return [buffers.write_at(a, (self.slot, i), v) for a, v in zip(arrays, values, strict=True)]

    def read(self, i) -> list:
        """One layer's values."""
        return [buffers.read_at(a, (self.slot, i)) for a in self.arrays]


def forward(
    stack: Stack,
    layers: list,
    x: jax.Array,
    batch: dict,
    span: Span,
    structure: Structure,
    ring: Ring | None = None,
):
    """Runs the blocks. Returns (x, kept), kept a list of arrays with a leading layers dim.

    With a ring, each layer's part goes straight into the slot and kept is the ring's arrays.
    """

    def block(x, i):
        weights = stack.fetch(_layer(layers, span.first + i))
        shared = {**batch, "layer": span.number + i}
        y, pullback = jax.vjp(_remat(stack, shared), weights, x)
        leaves, structure.tree = jax.tree.flatten(pullback)
        shared = jax.tree.leaves(shared)
        structure.sources = [_source(leaf, weights, shared) for leaf in leaves]
        kept = [a for a, source in zip(leaves, structure.sources, strict=True) if source is None]
        return y, [_offload(a) for a in kept] if stack.remat == "offload" else kept

    def body(carry, i):
        x, arrays = carry
        if span.count is None:
            y, kept = block(x, i)
        else:  # a place without a layer passes x on
            y, kept = when(i < span.count, lambda x: block(x, i), x)
            y = jnp.where(i < span.count, y, x)
        if ring is None:
            return (y, arrays), kept
        return (y, ring.write(arrays, kept, i)), None

    (x, arrays), kept = lax.scan(body, (x, ring.arrays if ring else []), _places(span))
    return x, arrays if ring else kept


def backward(
    stack: Stack,
    layers: list,
    kept: list | Ring,
    dx: jax.Array,
    batch: dict,
    sums: list,
    span: Span,
    structure: Structure,
    active=None,
):
    """Goes back through the blocks. Returns (dx, sums): sums with each layer's gradients added.

    Where `active` is given and false, gradients of whatever was computed are not added.
    """

    def block(dx, arrays, i):
        if stack.remat == "offload":
            arrays = [_bring_back(a) for a in arrays]
        weights = stack.fetch(_layer(layers, span.first + i))
        shared = jax.tree.leaves({**batch, "layer": span.number + i})
        rest = iter(arrays)
        leaves = [
            next(rest) if s is None else (weights if s[0] == "weight" else shared)[s[1]]
            for s in structure.sources
        ]
        gradients, dx = jax.tree.unflatten(structure.tree, leaves)(dx)
        return dx, stack.give_back(gradients)

    def body(carry, item):
        dx, sums = carry
        i, arrays = item
        arrays = kept.read(i) if isinstance(kept, Ring) else arrays
        counted = active
        if span.count is None:
            dx, gradients = block(dx, arrays, i)
        else:
            counted = i < span.count if active is None else active & (i < span.count)
            new, gradients = when(i < span.count, lambda dx, a: block(dx, a, i), dx, arrays)
            dx = jnp.where(i < span.count, new, dx)
        if counted is not None:
            gradients = [jnp.where(counted, g, 0) for g in gradients]
        place = span.first + i
        return (dx, [_add_at(s, g, place) for s, g in zip(sums, gradients, strict=True)]), None

    scanned = None if isinstance(kept, Ring) else kept
    (dx, sums), _ = lax.scan(body, (dx, sums), (_places(span), scanned), reverse=True)
    return dx, sums


def apply(stack: Stack, layers: list, x: jax.Array, batch: dict, span: Span) -> jax.Array:
    """Runs the blocks and keeps nothing."""

    def body(x, i):
        weights = stack.fetch(_layer(layers, span.first + i))
        y = stack.block(weights, x, {**batch, "layer": span.number + i})
        return (y if span.count is None else jnp.where(i < span.count, y, x)), None

    return lax.scan(body, x, _places(span))[0]


def zeros_for(weights: list) -> list:
    """fp32 zeros with the shapes of `weights`, as different over the mesh as they are."""
    return [vary_like(jnp.zeros(w.shape, jnp.float32), w) for w in weights]


def _remat(stack: Stack, shared: dict):
    def run(weights, x):
        return stack.block(weights, x, shared)

    if stack.remat not in POLICIES:
        return run
    return jax.checkpoint(run, policy=POLICIES[stack.remat])


def _places(span: Span) -> jax.Array:
    return jnp.arange(span.size, dtype=jnp.int32)


def _layer(layers: list, place) -> list:
    return [lax.dynamic_index_in_dim(a, place, keepdims=False) for a in layers]


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
