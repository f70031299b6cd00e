"""Linear layers split over `tensor`: the column kind splits outputs, the row kind inputs."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.nn.parallel import gradient_of, sequence_first, sum_partial
from jaxpar.nn.params import normal, param

PRODUCT = "product"
"""Name of what linear layers compute, for remat policies."""


class ColumnLinear(nnx.Module):
    """y[b, t, *out] = x[b, t, D] . w[D, *out] + bias[*out], with `out` split over tensor.

    `out_dims` names the output dims, such as ("heads", "head_dim") or ("ffn",). No communication:
    x holds the whole sequence and the whole embed dim.
    """

    def __init__(
        self,
        embed_dim: int,
        out: Sequence[int],
        out_dims: Sequence[str],
        *,
        key: jax.Array,
        std: float,
        bias: bool = False,
    ):
        self.weight = param(normal(key, (embed_dim, *out), std), ("embed", *out_dims))
        self.bias = param(jnp.zeros(out), out_dims, decay=False) if bias else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T ..."]:
        # x[b, t, D] . w[D, out_tensor] -> y[b, t, out_tensor]; no communication
        y = product(x, self.weight[...], 1)
        return y if self.bias is None else y + self.bias[...]


class RowLinear(nnx.Module):
    """y[b, s, D] = x[b, t, *in] . w[*in, D] + bias[D], with `in` split over tensor.

    The partial sums are added over tensor by a reduce-scatter along the sequence (sequence
    parallelism) or an all-reduce; the bias is added once, after the sum.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        in_dims: Sequence[str],
        embed_dim: int,
        *,
        key: jax.Array,
        std: float,
        bias: bool = False,
    ):
        self.weight = param(normal(key, (*inputs, embed_dim), std), (*in_dims, "embed"))
        self.bias = param(jnp.zeros((embed_dim,)), ("embed",), decay=False) if bias else None

    def __call__(self, x: Float[Array, "B T ..."], batch: dict) -> Float[Array, "B S D"]:
        # x[b, t, in_tensor] . w[in_tensor, D] -> partial [b, t, D]; summed over tensor
        weight = self.weight[...]
        y = sum_partial(product(x, weight, weight.ndim - 1), batch)
        return y if self.bias is None else y + self.bias[...]


def product(
    x: Float[Array, "b t ..."], w: Float[Array, "..."], contracted: int
) -> Float[Array, "b t ..."]:
    """x[b, t, *in] . w[*in, *out] -> y[b, t, *out], with `contracted` dims in `in`.

    Computed and differentiated in the order of `sequence_first`. Keeps x and w as they are, so
    several products of one x keep it once. Its result has the name PRODUCT for remat policies.
    Reverse mode only: `jax.jvp` through it raises TypeError.
    """
    return checkpoint_name(_product(x, w, contracted), PRODUCT)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, w, contracted):
    return sequence_first(jnp.tensordot(sequence_first(x), w, axes=contracted))


def _forward(x, w, contracted):
    return _product(x, w, contracted), (x, w)


def _backward(contracted, saved, dy):
    x, w = saved
    dy = sequence_first(dy)
    outputs = list(range(contracted, w.ndim))
    dx = jnp.tensordot(dy, w, axes=(list(range(2, dy.ndim)), outputs))
    dw = jnp.tensordot(sequence_first(x), dy, axes=((0, 1), (0, 1)))
    return gradient_of(x, sequence_first(dx)), gradient_of(w, dw)


_product.defvjp(_forward, _backward)
