"""Ring buffers of the pipeline: arrays with a leading dim of slots, read and written in place."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar import _jax_compat
from jaxpar.nn.parallel import vary, vary_like
from jaxpar.pipeline.branch import empty

AXIS = "pipe"


def typed(function):
    """Shapes and mesh types of what `function` returns; nothing runs."""
    avals = jax.make_jaxpr(function)().out_avals
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(function)), avals)


def blank(aval, lead=(), axes=(AXIS,)):
    axes = _jax_compat.varying_axes(aval) | set(axes)
    return vary(empty((*lead, *aval.shape), aval.dtype), sorted(axes))


def blank_like(x):
    return vary_like(empty(x.shape, x.dtype), x)


def buffer(aval, slots: int):
    """A ring buffer, in the memory (device or host) in which the values are."""
    made = blank(aval, (slots,))
    on_host = aval.memory_space == jax.memory.Space.Host
    return jax.device_put(made, jax.memory.Space.Host) if on_host else made


def read(buffer, slot):
    return lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), keepdims=False)


def write(buffer, slot, value):
    """Writes `value` where slot >= 0; elsewhere the buffer stays as it is."""
    value = jnp.where(slot >= 0, value, read(buffer, slot))
    return lax.dynamic_update_index_in_dim(buffer, value, jnp.maximum(slot, 0), axis=0)


def read_at(buffer, place):
    """buffer[place] for a tuple of leading indices."""
    start = (*place, *(0,) * (buffer.ndim - len(place)))
    sizes = (1,) * len(place) + buffer.shape[len(place) :]
    return lax.dynamic_slice(buffer, start, sizes).reshape(buffer.shape[len(place) :])


def write_at(buffer, place, value):
    """The buffer with `value` at a tuple of leading indices."""
    start = (*place, *(0,) * (buffer.ndim - len(place)))
    value = vary_like(value.reshape((1,) * len(place) + value.shape), buffer)
    return lax.dynamic_update_slice(buffer, value, start)
