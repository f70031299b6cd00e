"""The loss alone, through the pipeline: the executor's forward ticks, with nothing kept."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.nn.parallel import vary, vary_like
from jaxpar.pipeline import buffers, ticks
from jaxpar.pipeline.buffers import AXIS
from jaxpar.pipeline.executor import Tick
from jaxpar.pipeline.program import Program
from jaxpar.pipeline.stage import Structure


def evaluate(program: Program, outer: list, layers: list, microbatches: dict):
    """(sum, count) of the loss over all microbatches: the table's forward ticks, nothing kept."""
    tick = Tick(program, outer, layers, microbatches, jnp.float32(1), Structure())
    me = vary(jnp.int32(0), (AXIS,))
    x = buffers.typed(lambda: program.embed(program.fetch_outer(outer, ()), tick._batch(me)))
    totals = [
        vary_like(jnp.zeros(a.shape), buffers.blank(a, axes=()))
        for a in buffers.typed(lambda: tick._stored_loss(buffers.blank(x), jnp.int32(0)))
    ]
    carry = {"x": buffers.buffer(x, max(program.table.slots_input)), "kept": [], "totals": totals}
    if program.one_at_a_time:
        carry["zero"] = vary_like(jnp.float32(0), buffers.blank(x))
    for segment in ticks.segments(program.table):
        if segment.forward:
            scanned = jax.tree.map(jnp.asarray, ticks.arrays(program.table, segment, False))
            carry, _ = lax.scan(partial(tick.run_forward_only, segment), carry, scanned)
    return carry["totals"]
