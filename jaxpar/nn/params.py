"""Parameters that name their dims, and stacks of equal blocks on a `layers` dim."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx


def param(value: jax.Array, dims: Sequence[str | None], *, decay: bool = True) -> nnx.Param:
    """A parameter whose dimensions are called `dims` (see `jaxpar.dims.RULES`).

    `decay` says whether weight decay applies to it: to matrices, not to biases or norm scales.
    """
    if len(dims) != value.ndim:
        raise ValueError(
            f"dims {tuple(dims)} name {len(dims)} dimensions, the value has shape {value.shape}"
        )
    return nnx.Param(value, dims=tuple(dims), decay=decay)


def normal(key: jax.Array, shape: Sequence[int], std: float) -> jax.Array:
    """Normal fp32 numbers of standard deviation `std`; equal under every sharding."""
    return std * jax.random.normal(key, tuple(shape), jnp.float32)


def stack(make_block: Callable[[jax.Array], nnx.Module], num_layers: int, key: jax.Array):
    """One module whose parameters are those of `num_layers` blocks stacked on a `layers` dim.

    `make_block(key)` makes one block. Block i's numbers depend on `key` and i alone.
    """
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_layers))
    stacked = jax.vmap(make_block)(keys)

    def name_layers(variable):
        if isinstance(variable, nnx.Param):
            meta = {**variable.get_metadata(), "dims": ("layers", *variable.get_metadata("dims"))}
            return nnx.Param(variable.get_value(), **{k: meta[k] for k in ("dims", "decay")})
        return variable

    return jax.tree.map(name_layers, stacked, is_leaf=lambda v: isinstance(v, nnx.Variable))


def decay_mask(model):
    """True for the parameters that weight decay applies to, as optax masks want it.

    Decided per logical parameter by what it is, never by the rank of a stacked array, so norm
    scales and biases are left alone. Parameters of other libraries (plain arrays) with two or
    more dimensions are decayed.

    >>> import optax
    >>> tx = optax.adamw(1e-3, mask=decay_mask)
    """

    def wants(leaf):
        if not isinstance(leaf, nnx.Variable):
            return getattr(leaf, "ndim", 0) > 1
        mark = leaf.get_metadata().get("decay", leaf.get_value().ndim > 1)
        return jax.tree.map(lambda _: mark, leaf)

    return jax.tree.map(wants, model, is_leaf=lambda v: isinstance(v, nnx.Variable))
