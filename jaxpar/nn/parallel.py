"""What a layer needs to know of the mesh, and the few collectives layers are built from.

A layer uses a mesh axis only where it exists: outside `shard_map` every function here is the
identity, so the same module runs on one device. Shapes inside the manual region are in lower
case: b rows, t tokens of the whole sequence, s tokens of this device's share of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar import _jax_compat
from jaxpar.nn.order import Context


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """What the layout decides about the inside of layers; travels in a batch as `settings`.

    `sequence_parallel`: activations between blocks are split along the sequence over `tensor`.
    `vocab_axes`: axes the vocabulary is split over. `attention_kernel`: xla, cudnn or blockwise.
    `context`: how attention runs where the sequence is split between devices for good.
    """

    sequence_parallel: bool = False
    vocab_axes: tuple[str, ...] = ()
    attention_kernel: str = "xla"
    context: Context = Context()


def settings(batch: dict) -> Settings:
    """The settings a batch carries; the defaults of one device where it carries none."""
    return batch.get("settings", Settings())


def axis_exists(axis: str) -> bool:
    """Whether this is traced inside a `shard_map` over the axis."""
    try:
        return lax.axis_size(axis) > 0
    except NameError:
        return False


def axis_size(axis: str) -> int:
    """Number of devices along a mesh axis; 1 where the axis does not exist."""
    return lax.axis_size(axis) if axis_exists(axis) else 1


def axis_index(axes: tuple[str, ...]) -> jax.Array | int:
    """This device's place along several axes taken as one, the first outermost."""
    axes = tuple(a for a in axes if axis_size(a) > 1)
    return lax.axis_index(axes) if axes else 0


def vary(x: jax.Array, axes) -> jax.Array:
    """Types `x` as different on every device of `axes`; its gradient is then summed over them."""
    missing = tuple(a for a in axes if axis_size(a) > 1 and a not in _jax_compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Types `x` as different on the axes over which `other` is, those of one device as well."""
    missing = _jax_compat.varying_axes(other) - _jax_compat.varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def computed_again(function):
    """`function`, whose backward pass keeps its arguments alone and computes the rest again.

    For elementwise functions and norms, which cost little and would keep several arrays in fp32.
    """
    return jax.checkpoint(function, prevent_cse=False)


def zero_after(x: jax.Array) -> jax.Array:
    """The fp32 number 0, which only exists once `x` does; typed like it.

    A 32-bit word never has more than 64 ones, but XLA does not know that, so what is made of this
    number stays behind `x`, where it drops an `optimization_barrier` before it orders operations.
    """
    word = lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
    return (lax.population_count(word) > 64).astype(jnp.float32)


def zeros_after(x: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Zeros that exist only once `x` does, as different over the mesh as `x` is.

    Zeros made inside a loop do not depend on it, so XLA would make them before it and keep them
    all the while next to the buffer they start.
    """
    return jnp.broadcast_to(zero_after(x).astype(dtype), shape)


def gradient_of(primal: jax.Array, gradient: jax.Array) -> jax.Array:
    """`gradient` as `primal` has it: in its type, and summed over the axes on which only the
    gradient differs; what a backward rule of one's own must return."""
    axes = tuple(sorted(_jax_compat.varying_axes(gradient) - _jax_compat.varying_axes(primal)))
    return (lax.psum(gradient, axes) if axes else gradient).astype(primal.dtype)


def total(x: jax.Array) -> jax.Array:
    """Sum of `x` over all axes on which devices hold different values."""
    axes = tuple(sorted(_jax_compat.varying_axes(x)))
    return lax.psum(x, axes) if axes else x


def gather_sequence(x: jax.Array, batch: dict) -> jax.Array:
    """x[b, s_tensor, D] -> x[b, t, D]: all-gather over tensor, t * D elements a row.

    Without sequence parallelism x is there already; its gradient is summed over tensor here, once
    for all its uses.
    """
    if not settings(batch).sequence_parallel:
        return vary(x, ("tensor",))
    return lax.all_gather(x, "tensor", axis=1, tiled=True)


def sum_partial(x: jax.Array, batch: dict) -> jax.Array:
    """Adds the partial sums of a row-split product over tensor.

    x[b, t, D] -> x[b, s_tensor, D] by reduce-scatter with sequence parallelism, else -> x[b, t, D]
    by all-reduce.
    """
    if axis_size("tensor") == 1:
        return x
    if settings(batch).sequence_parallel:
        return lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
    return lax.psum(x, "tensor")


def sequence_first(x: jax.Array) -> jax.Array:
    """x[b, t, ...] -> [t, b, ...] where there is a tensor axis, else x as it is.

    A gather along the sequence leaves the sequence outermost in memory, so a product over all
    tokens taken in this order needs no copy of x.
    """
    return x if axis_size("tensor") == 1 else x.swapaxes(0, 1)


def local_sequence(x: jax.Array, batch: dict) -> jax.Array:
    """x[b, t, ...] -> x[b, s, ...]: this device's share of the sequence; no communication."""
    if not settings(batch).sequence_parallel:
        return x
    length = x.shape[1] // axis_size("tensor")
    return lax.dynamic_slice_in_dim(x, axis_index(("tensor",)) * length, length, axis=1)


def local_columns(batch: dict, length: int) -> jax.Array:
    """Place in the row, int32 [length] or [b, length], of each token this device holds between
    blocks."""
    if "places" in batch:
        return local_sequence(batch["places"], batch)
    start = axis_index(("tensor",)) * length if settings(batch).sequence_parallel else 0
    return start + jnp.arange(length, dtype=jnp.int32)
