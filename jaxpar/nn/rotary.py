"""Rotary position embedding in the rotate-half order, plain and Llama-3 scaled."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of long wavelengths for contexts beyond `original_max_len` tokens."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float[Array, "H/2"]:
    """Angle per position of each pair of features (Su et al., arXiv 2104.09864, section 3.4.2).

    With `scaling`: wavelengths over original_max_len / low_freq_factor are stretched by `factor`,
    those under original_max_len / high_freq_factor kept, and between them blended linearly
    (Llama 3.1 reference implementation, apply_scaling).
    """
    freqs = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return freqs
    turns = scaling.original_max_len * freqs / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return freqs * (keep + (1 - keep) / scaling.factor)


def tables(
    positions: Int[Array, "B T"], head_dim: int, theta: float, scaling: RopeScaling | None = None
):
    """cos and sin, fp32 [B, T, 1, H/2], for `rotate`; computed once for all layers."""
    angles = positions[..., None, None] * frequencies(head_dim, theta, scaling)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T N H"], cos, sin) -> Float[Array, "B T N H"]:
    """Turns the pair (x[i], x[i + H/2]) by its angle, in fp32; keeps the dtype of `x`."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
