"""A model and a table, as the executor takes them: functions on plain arrays, no model class."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar import _jax_compat
from jaxpar.pipeline.stage import Span, Stack
from jaxpar.pipeline.table import Table


@dataclasses.dataclass(frozen=True)
class Program:
    """A model and a table, ready to run.

    `embed(outer, batch) -> x`; `loss(outer, x, batch) -> (sum, count)`; `prepare(rows) -> batch`;
    `fetch_outer(stored, after)` and `give_back_outer(gradients)` move the outer weights; a gradient
    that is None stays so.
    On one stage there is no table; `finish(one layer's sums)` reduces what is complete with the
    last microbatch, and `fetch_ahead` says that weights come one block ahead of their use.
    `counts[stage, chunk]`: layers held there. `idle`: "skip" branches around what a stage has not
    to do, "compute" computes on what is there and drops it, "everywhere" in places without a layer
    as well, because blocks permute over the mesh. `one_at_a_time`: permutations wait for one
    another, as emulated devices need it.
    """

    table: Table | None
    counts: np.ndarray
    stack: Stack
    prepare: Callable
    embed: Callable
    loss: Callable
    fetch_outer: Callable
    give_back_outer: Callable
    finish: Callable | None = None
    fetch_ahead: bool = False
    idle: str = "skip"
    one_at_a_time: bool = False

    def span(self, me, chunk, active=None) -> Span:
        """The layers of one chunk on this stage; `active`: whether there is something to do."""
        size = int(self.counts.max())
        order = np.argsort(self.table.parts, axis=None)
        starts = np.zeros(self.counts.size, np.int32)
        starts[order] = np.concatenate([[0], np.cumsum(self.counts.reshape(-1)[order])[:-1]])
        number = jnp.asarray(starts.reshape(self.counts.shape))[me, chunk]
        even = bool((self.counts == size).all())
        count = None if even else jnp.asarray(self.counts, jnp.int32)[me, chunk]
        return Span(size, chunk * size, number, count, active, self.idle)


def vjp_of_read(function, weights: list, *args):
    """`jax.vjp(function, weights, *args)`; the gradient of a weight that it does not read is None.

    Embedding and head read each their own part of the outer weights; what is not read need not
    be summed over devices.
    """
    jaxpr = jax.make_jaxpr(function)(weights, *args)
    dead = _jax_compat.dead_inputs(jaxpr, [True] * len(jaxpr.jaxpr.outvars))[: len(weights)]

    def of_read(read, *args):
        rest = iter(read)
        return function([w if d else next(rest) for w, d in zip(weights, dead, strict=True)], *args)

    value, back = jax.vjp(of_read, [w for w, d in zip(weights, dead, strict=True) if not d], *args)

    def pullback(gradient):
        read, *others = back(gradient)
        rest = iter(read)
        return [None if d else next(rest) for d in dead], *others

    return value, pullback
