"""The executor where there is one stage: microbatch after microbatch, forward and backward.

Takes what `executor.run` takes. With ZeRO 0 the last microbatch reduces the gradients: each layer's
sum travels while the backward pass goes through the layers before.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.nn.parallel import vary_like
from jaxpar.pipeline import ahead, stage
from jaxpar.pipeline.program import Program
from jaxpar.pipeline.stage import Span, Structure


def run(
    program: Program,
    outer: list,
    layers: list,
    microbatches: dict,
    outer_sums: list,
    layer_sums: list,
    scale,
):
    """Runs every microbatch, arrays [M, b, t], forward and backward.

    Returns (loss sum, outer sums, layer sums); `scale` multiplies the loss before the backward.
    With `program.finish` the layer sums are given back.
    """
    count = jax.tree.leaves(microbatches)[0].shape[0]

    def one(sums, rows, finish=None):
        loss, gradients, layer_sums = _one(program, outer, layers, sums[1], rows, scale, finish)
        return ([s + g for s, g in zip(sums[0], gradients, strict=True)], layer_sums), loss

    sums = (outer_sums, layer_sums)
    if count == 1:  # no sums of layers, if they are given back at once
        sums = sums if program.finish is None else (outer_sums, None)
        sums, loss = one(sums, _microbatch(microbatches, 0), program.finish)
    elif program.finish is None:
        sums, losses = lax.scan(one, sums, microbatches)
        loss = losses.sum()
    else:
        sums, losses = lax.scan(one, sums, jax.tree.map(lambda a: a[:-1], microbatches))
        sums, loss = one(sums, _microbatch(microbatches, -1), program.finish)
        loss += losses.sum()
    return loss, *sums


def evaluate(program: Program, outer: list, layers: list, microbatches: dict):
    """(sum, count) of the loss over all microbatches; nothing kept."""

    sums, counts = collect(program, outer, layers, microbatches)
    return sums.sum(), counts.sum()


def collect(program: Program, outer: list, layers: list, microbatches: dict):
    """What `program.loss` gives for each microbatch, stacked [M, ...]."""

    def one(_, rows):
        batch = program.prepare(rows)
        x = program.embed(program.fetch_outer(outer, rows), batch)
        x = stage.apply(program.stack, layers, x, batch, Span(layers[0].shape[0]))
        return None, program.loss(program.fetch_outer(outer, x), x, batch)

    return lax.scan(one, None, microbatches)[1]


def _one(program: Program, outer, layers, layer_sums, rows, scale, finish):
    """Forward and backward of one microbatch: (loss sum, outer gradients, layer sums)."""
    batch, stack, structure = program.prepare(rows), program.stack, Structure()
    span = Span(layers[0].shape[0])
    weights = program.fetch_outer(outer, rows)
    x, embed_back = jax.vjp(lambda w: program.embed(w, batch), weights)
    if program.fetch_ahead:
        x, kept, held = ahead.forward(stack, layers, x, batch, structure)
    else:
        x, kept = stage.forward(stack, layers, x, batch, span, structure)
    weights = program.fetch_outer(outer, x)
    loss, loss_back = jax.vjp(lambda w, x: program.loss(w, x, batch)[0], weights, x)
    from_loss, dx = loss_back(vary_like(scale, loss))
    if program.fetch_ahead:
        dx, layer_sums = ahead.backward(stack, layers, kept, held, dx, batch, layer_sums, structure)
    else:
        dx, layer_sums = stage.backward(
            stack, layers, kept, dx, batch, layer_sums, span, structure, finish
        )
    (from_embed,) = embed_back(dx)
    gradients = [
        a.astype(jnp.float32) + b.astype(jnp.float32)
        for a, b in zip(from_loss, from_embed, strict=True)
    ]
    return loss, program.give_back_outer(gradients), layer_sums


def _microbatch(microbatches: dict, number: int) -> dict:
    return jax.tree.map(lambda a: a[number], microbatches)
