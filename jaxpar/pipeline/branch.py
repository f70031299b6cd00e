"""Branches inside the manual region whose predicate differs along `pipe`.

All devices of a stage take the same branch, so collectives over any other axis are right inside;
collectives over `pipe` stay outside, or in branches that every device takes alike.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar import _jax_compat
from jaxpar.nn.parallel import vary, vary_like


def when(predicate, function, *args):
    """function(*args) where `predicate`, else zeros of its shapes; nothing is computed there."""
    shapes = jax.make_jaxpr(function)(*args).out_avals
    tree = jax.tree.structure(jax.eval_shape(function, *args))
    axes = _jax_compat.varying_axes(predicate)

    def run(*args):
        return [vary(x, sorted(axes)) for x in jax.tree.leaves(function(*args))]

    def idle(*args):
        return [vary(jnp.zeros(a.shape, a.dtype), sorted(_jax_compat.varying_axes(a) | axes)) for a in shapes]

    return tree.unflatten(lax.cond(predicate, run, idle, *args))


def update_when(predicate, function, carry, *args):
    """function(carry, *args) where `predicate`, else `carry` as it is; typed like the carry."""

    def run(carry, *args):
        new = function(carry, *args)
        return jax.tree.map(vary_like, new, carry)

    return lax.cond(predicate, run, lambda carry, *args: carry, carry, *args)
