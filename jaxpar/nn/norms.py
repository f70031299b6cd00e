"""Norms over the embed (or head) dim, computed in fp32 whatever the compute type."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.nn.parallel import computed_again
from jaxpar.nn.params import param


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim (Zhang and Sennrich, arXiv 1910.07467, eq. 4)."""

    def __init__(self, size: int, *, dim: str = "embed", epsilon: float = 1e-5):
        self.scale = param(jnp.ones((size,)), (dim,), decay=False)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return _rms_norm(x, self.scale[...], self.epsilon)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias over the last dim (Ba et al., arXiv 1607.06450)."""

    def __init__(self, size: int, *, dim: str = "embed", epsilon: float = 1e-5):
        self.scale = param(jnp.ones((size,)), (dim,), decay=False)
        self.bias = param(jnp.zeros((size,)), (dim,), decay=False)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return _layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


@computed_again
def _rms_norm(x, scale, epsilon):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + epsilon)
    return (h * scale.astype(jnp.float32)).astype(x.dtype)


@computed_again
def _layer_norm(x, scale, bias, epsilon):
    h = x.astype(jnp.float32)
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + epsilon)
    return (h * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
