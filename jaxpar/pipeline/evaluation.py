"""The forward pass alone, through the pipeline: the executor's forward ticks, nothing kept."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.nn.parallel import vary, vary_like
from jaxpar.pipeline import buffers, ticks
from jaxpar.pipeline.branch import update_when
from jaxpar.pipeline.buffers import AXIS
from jaxpar.pipeline.executor import Tick
from jaxpar.pipeline.program import Program
from jaxpar.pipeline.stage import Structure


def evaluate(program: Program, outer: list, layers: list, microbatches: dict):
    """(sum, count) of the loss over all microbatches: the table's forward ticks, nothing kept."""
    tick = Tick(program, outer, layers, microbatches, jnp.float32(1), Structure())

    def add(sums, y, m):
        return [a + b for a, b in zip(sums, tick._stored_loss(y, m), strict=True)]

    parts = buffers.typed(lambda: tick._stored_loss(buffers.blank(_entering(tick)), jnp.int32(0)))
    totals = [vary_like(jnp.zeros(a.shape), buffers.blank(a, axes=())) for a in parts]
    return _run(tick, add, totals)


def collect(program: Program, outer: list, layers: list, microbatches: dict):
    """What `program.loss` gives for each microbatch, stacked [M, ...]; all stages get it."""
    tick = Tick(program, outer, layers, microbatches, jnp.float32(1), Structure())

    def put(results, y, m):
        value = _whole(tick, y, m)
        return lax.dynamic_update_index_in_dim(results, value, m, axis=0)

    one = buffers.typed(lambda: _whole(tick, buffers.blank(_entering(tick)), jnp.int32(0)))
    count = jax.tree.leaves(microbatches)[0].shape[0]
    results = jnp.zeros((count, *one.shape), one.dtype)
    return _run(tick, put, vary_like(results, buffers.blank(one, axes=())))


def _entering(tick: Tick):
    """Type of what the embedding makes."""
    me = vary(jnp.int32(0), (AXIS,))
    outer = tick.program.fetch_outer(tick.outer, ())
    return buffers.typed(lambda: tick.program.embed(outer, tick._batch(me)))


def _run(tick: Tick, take, totals):
    x, table = _entering(tick), tick.program.table
    carry = {"x": buffers.buffer(x, max(table.slots_input)), "kept": [], "totals": totals}
    if tick.program.one_at_a_time:
        carry["zero"] = vary_like(jnp.float32(0), buffers.blank(x))
    for segment in ticks.segments(table):
        if segment.forward:
            scanned = jax.tree.map(jnp.asarray, ticks.arrays(table, segment, False))
            carry, _ = lax.scan(partial(_run_tick, tick, segment, take), carry, scanned)
    return carry["totals"]


def _run_tick(tick: Tick, segment, take, carry: dict, now: dict):
    """A tick without backward; `take(totals, y, m)` adds what left the model to the totals."""
    carry, me, at = dict(carry), lax.axis_index(AXIS), now["alike"]
    mine = {name: a[me] for name, a in now["stage"].items()}
    y = tick._run_forward(mine, tick._embed(segment.embed, at["embed"], carry), me, carry)
    if segment.head != "never":
        of_now = partial(take, m=at["head"])
        carry["totals"] = update_when(at["head"] >= 0, of_now, carry["totals"], y)
    for i, pairs in segment.sends:
        arrived = tick._permute(y, pairs, carry)
        carry["x"] = buffers.write(carry["x"], mine[f"arrives_{i}"], arrived)
    return carry, None


def _whole(tick: Tick, y, m):
    """`program.loss` of a microbatch's last activations, as a whole on every stage."""
    last = ticks.places(tick.program.table)[1][0]
    # x[b, s, D] of the last stage to all: all-reduce over pipe of its bytes
    x = lax.psum(jnp.where(lax.axis_index(AXIS) == last, y, 0), AXIS)
    return tick.program.loss(tick.program.fetch_outer(tick.outer, (y,)), x, tick._batch(m))
