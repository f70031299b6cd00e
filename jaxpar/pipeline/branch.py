"""Branches inside the manual region whose predicate differs along `pipe`.

All devices of a stage take the same branch, so collectives over any other axis are right inside;
collectives over `pipe` stay outside, or in branches that every device takes alike.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar import _jax_compat
from jaxpar.nn.parallel import vary, vary_like

EMPTY = 0.0
"""What stands where nothing was computed; nothing may depend on it, and tests set it to NaN."""


def empty(shape, dtype) -> jax.Array:
    """An array that nobody may read anything from."""
    return jnp.full(shape, EMPTY if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


def when(predicate, function, *args):
    """function(*args) where `predicate`, else empty arrays of its shapes, and nothing computed."""
    shapes = jax.make_jaxpr(function)(*args).out_avals
    tree = jax.tree.structure(jax.eval_shape(function, *args))
    axes = _jax_compat.varying_axes(predicate)

    def run(*args):
        return [vary(x, sorted(axes)) for x in jax.tree.leaves(function(*args))]

    def idle(*args):
        typed = [(a, sorted(_jax_compat.varying_axes(a) | axes)) for a in shapes]
        return [vary(empty(a.shape, a.dtype), over) for a, over in typed]

    return tree.unflatten(lax.cond(predicate, run, idle, *args))


def update_when(predicate, function, carry, *args):
    """function(carry, *args) where `predicate`, else `carry` as it is; typed like the carry."""

    def run(carry, *args):
        new = function(carry, *args)
        return jax.tree.map(vary_like, new, carry)

    return lax.cond(predicate, run, lambda carry, *args: carry, carry, *args)
