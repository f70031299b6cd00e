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

from jaxpar.nn.linear import PRODUCT
from jaxpar.nn.parallel import vary_like
from jaxpar.pipeline import buffers
from jaxpar.pipeline.branch import run_where

POLICIES = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(PRODUCT),
    ),
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

    `number` is the model's number of the first of them. `count` None: all hold one. `active` None:
    there is something to do; else whether there is, and `idle` says what happens where not:
    "skip" nothing, "compute" a computation that is dropped, "everywhere" one in places without a
    layer as well.
    """

    size: int
    first: jax.Array | int = 0
    number: jax.Array | int = 0
    count: jax.Array | None = None
    active: jax.Array | None = None
    idle: str = "skip"

    def runs(self, i):
        """Whether place i is run; None where it always is."""
        if self.idle == "everywhere":
            return None
        return self._both(i, self.active if self.idle == "skip" else None)

    def passes(self, i, y, x):
        """y, or x where place i was run and holds no layer."""
        if self.idle != "everywhere" or self.count is None:
            return y
        return jnp.where(i < self.count, y, x)

    def counts(self, i):
        """Whether what place i computes counts; None where it always does."""
        return self._both(i, self.active)

    def _both(self, i, active):
        if self.count is None:
            return active
        return i < self.count if active is None else active & (i < self.count)


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

    def write(self, values: list, i) -> list:
        """The arrays with one layer's values in place."""
        pairs = zip(self.arrays, values, strict=True)
        return [buffers.write_at(a, (self.slot, i), v) for a, v in pairs]

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
        weights = stack.fetch(layer_at(layers, span.first + i))
        return block_forward(stack, weights, x, {**batch, "layer": span.number + i}, structure)

    def body(carry, i):
        x, arrays = carry
        now = Ring(arrays, ring.slot) if ring else None

        def idle(empty, x):  # passes x on, and leaves the ring as it is
            return x, now.read(i) if now else empty[1]

        y, kept = run_where(span.runs(i), lambda x: block(x, i), x, otherwise=idle)
        y = span.passes(i, y, x)
        return ((y, now.write(kept, i)), None) if now else ((y, arrays), kept)

    (x, arrays), kept = lax.scan(body, (x, ring.arrays if ring else []), _places(span))
    return x, arrays if ring else kept


def backward(
    stack: Stack,
    layers: list,
    kept: list | Ring,
    dx: jax.Array,
    batch: dict,
    sums: list | None,
    span: Span,
    structure: Structure,
    finish: Callable | None = None,
):
    """Goes back through the blocks. Returns (dx, sums): sums with each layer's gradients added.

    With `finish` these are complete, and the result holds finish(one layer's sums) instead: it
    may reduce them over devices, which is hidden behind the blocks that follow. `sums` None: zero.
    """

    def block(dx, arrays, i):
        arrays = kept.read(i) if isinstance(kept, Ring) else arrays
        weights = stack.fetch(layer_at(layers, span.first + i))
        shared = {**batch, "layer": span.number + i}
        dx, gradients = block_backward(stack, weights, arrays, dx, shared, structure)
        return dx, stack.give_back(gradients)

    def body(carry, i):
        dy, sums = carry
        arrays = None if isinstance(kept, Ring) else layer_at(kept, i)
        dx, gradients = run_where(
            span.runs(i),
            lambda dy: block(dy, arrays, i),
            dy,
            otherwise=lambda empty, dy: (dy, empty[1]),
        )
        dx = span.passes(i, dx, dy)
        counts = span.counts(i)
        if counts is not None:
            gradients = [jnp.where(counts, g, 0) for g in gradients]
        if finish is None:
            return (dx, add_at(sums, gradients, span.first + i)), None
        if sums is not None:
            before = layer_at(sums, span.first + i)
            gradients = [s + g for s, g in zip(before, gradients, strict=True)]
        return (dx, sums), finish(gradients)

    (dx, sums), finished = lax.scan(body, (dx, sums), _places(span), reverse=True)
    return dx, sums if finish is None else finished


def block_forward(stack: Stack, weights: list, x, shared: dict, structure: Structure):
    """One block. Returns (y, what its backward pass needs besides weights and `shared`)."""
    y, pullback = jax.vjp(_remat(stack, shared), weights, x)
    leaves, structure.tree = jax.tree.flatten(pullback)
    kept, shared = [], jax.tree.leaves(shared)
    structure.sources = [_source(leaf, weights, shared, kept) for leaf in leaves]
    return y, [_offload(a) for a in kept] if stack.remat == "offload" else kept


def block_backward(stack: Stack, weights: list, kept: list, dx, shared: dict, structure: Structure):
    """Back through one block. Returns (dx, gradients of the weights it used)."""
    kept = [_bring_back(a) for a in kept] if stack.remat == "offload" else kept
    arrays = {"weight": weights, "shared": jax.tree.leaves(shared), "kept": kept}
    leaves = [arrays[kind][i] for kind, i in structure.sources]
    gradients, dx = jax.tree.unflatten(structure.tree, leaves)(dx)
    return dx, gradients


def apply(stack: Stack, layers: list, x: jax.Array, batch: dict, span: Span) -> jax.Array:
    """Runs the blocks and keeps nothing."""

    def block(x, i):
        weights = stack.fetch(layer_at(layers, span.first + i))
        return stack.block(weights, x, {**batch, "layer": span.number + i})

    def body(x, i):
        y = run_where(span.runs(i), lambda x: block(x, i), x, otherwise=lambda empty, x: x)
        return span.passes(i, y, x), None

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


def layer_at(layers: list, place) -> list:
    """One layer's leaves of a stack."""
    return [lax.dynamic_index_in_dim(a, place, keepdims=False) for a in layers]


def _source(leaf, weights: list, shared: list, kept: list) -> tuple[str, int]:
    """Which array a residual is; one that is no other's yet joins `kept`."""
    for kind, arrays in (("weight", weights), ("shared", shared), ("kept", kept)):
        for i, array in enumerate(arrays):
            if leaf is array:
                return kind, i
    kept.append(leaf)
    return "kept", len(kept) - 1


def add_at(sums: list, gradients: list, place) -> list:
    """sums[place] += gradients; a sum is read once its gradient is there: no copy waits for it."""

    def add(total, value):
        total, value = lax.optimization_barrier((total, value))
        row = lax.dynamic_index_in_dim(total, place, keepdims=False) + value.astype(jnp.float32)
        return lax.dynamic_update_index_in_dim(total, row, place, axis=0)

    return [add(s, g) for s, g in zip(sums, gradients, strict=True)]


def _offload(x):
    return jax.device_put(x, jax.memory.Space.Host)


def _bring_back(x):
    return jax.device_put(x, jax.memory.Space.Device)
