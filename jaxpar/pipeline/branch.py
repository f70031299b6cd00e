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


def when(predicate, function, *args, otherwise=None):
    """function(*args) where `predicate`; elsewhere it is not computed, and the result is empty.

    `otherwise(empty, *args)` makes another result of the same shapes, from the empty one.
    """
    shapes = jax.make_jaxpr(function)(*args).out_avals
    tree = jax.tree.structure(jax.eval_shape(function, *args))
    axes = _jax_compat.varying_axes(predicate)
    typed = [sorted(_jax_compat.varying_axes(a) | axes) for a in shapes]

    def as_typed(result):
        return [vary(x, over) for x, over in zip(jax.tree.leaves(result), typed, strict=True)]

    def run(*args):
        return as_typed(function(*args))

    def idle(*args):
        result = tree.unflatten([empty(a.shape, a.dtype) for a in shapes])
        return as_typed(result if otherwise is None else otherwise(result, *args))

    return tree.unflatten(lax.cond(predicate, run, idle, *args))


def run_where(predicate, function, *args, otherwise):
    """`when`, without a branch where `predicate` is None: always."""
    if predicate is None:
        return function(*args)
    return when(predicate, function, *args, otherwise=otherwise)


def update_when(predicate, function, carry, *args):
    """function(carry, *args) where `predicate`, else `carry` as it is; typed like the carry."""

    def run(carry, *args):
        new = function(carry, *args)
        return jax.tree.map(vary_like, new, carry)

    return lax.cond(predicate, run, lambda carry, *args: carry, carry, *args)
