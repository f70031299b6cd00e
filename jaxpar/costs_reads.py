"""Which weights each part of a model reads, off its traced functions: what ZeRO 3 has to bring.

The one idea: a weight that no result depends on is never fetched and its gradient never summed,
so what travels follows from the model's own program.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar import _jax_compat
from jaxpar.layout import Layout
from jaxpar.nn.parallel import Settings
from jaxpar.parts import Parts
from jaxpar.pipeline import stage
from jaxpar.region import COMPUTE


@dataclasses.dataclass(frozen=True)
class Reads:
    """Who reads each leaf of a model, in leaf order; False where a leaf is not theirs."""

    embed: tuple[bool, ...]
    loss: tuple[bool, ...]
    backward: tuple[bool, ...]


def reads(model, parts: Parts, layout: Layout) -> Reads:
    """What embedding, head and the backward pass of a block read.

    A block's backward pass does not read biases that are only added, nor norm scales, which are
    kept as they are small. Nothing runs.
    """
    compute = COMPUTE[layout.precision]
    leaves = [jax.ShapeDtypeStruct(s.shape, compute) for s in parts.splits]
    outer = parts.outer(leaves)
    layers = [jax.ShapeDtypeStruct(w.shape[1:], compute) for w in parts.layers(leaves)]
    shape = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    batch = dict(
        tokens=shape,
        targets=shape,
        positions=shape,
        weights=jax.ShapeDtypeStruct((1, 8), jnp.float32),
    )

    def prepare(batch):
        batch = {**batch, "settings": Settings(), "rows": jnp.arange(1)}
        return model.prepare(batch) if hasattr(model, "prepare") else batch

    def embed(outer, batch):
        return parts.model(outer).embed(prepare(batch))

    def loss(outer, x, batch):
        return parts.model(outer).loss(x, prepare(batch))[0]

    def block(weights, x, batch):
        return model.block(parts.layer_tree.unflatten(weights), x, {**prepare(batch), "layer": 0})

    x = jax.eval_shape(embed, outer, batch)
    first = _reads(embed, outer, batch)
    last = _reads(loss, outer, x, batch) if hasattr(model, "loss") else [not r for r in first]
    again = _read_by_backward(block, layers, x, batch, layout.remat)
    no_layer, no_outer = [False] * len(layers), [False] * len(outer)
    return Reads(
        tuple(parts.join(first, no_layer)),
        tuple(parts.join(last, no_layer)),
        tuple(parts.join(no_outer, again)),
    )


def _read_by_backward(block, weights: list, x, batch, remat: str) -> list[bool]:
    """Which weights of a block its backward pass reads, as `pipeline.stage` keeps things."""
    found = {}

    def forward(weights, x, batch):
        def run(weights, x):
            return block(weights, x, batch)

        if remat in stage.POLICIES:
            run = jax.checkpoint(run, policy=stage.POLICIES[remat])
        kept, found["pullback"] = jax.tree.flatten(jax.vjp(run, weights, x)[1])
        found["place"] = [next((i for i, w in enumerate(weights) if w is a), None) for a in kept]
        return kept

    kept = jax.eval_shape(forward, weights, x, batch)
    read = _reads(lambda kept, dx: found["pullback"].unflatten(kept)(dx), kept, x)
    live = {place for place, is_read in zip(found["place"], read, strict=True) if is_read}
    return [i in live for i in range(len(weights))]


def _reads(function, weights: list, *rest) -> list[bool]:
    """Which of `weights` the results of function(weights, *rest) depend on."""
    jaxpr = jax.make_jaxpr(function)(weights, *rest)
    dead = _jax_compat.dead_inputs(jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    return [not d for d in dead[: len(weights)]]
