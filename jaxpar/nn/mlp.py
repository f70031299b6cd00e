"""Feed-forward layers, the hidden dim split over `tensor`."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.nn.linear import ColumnLinear, RowLinear
from jaxpar.nn.parallel import computed_again


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202). x[b, t, D] -> [b, s, D]."""

    def __init__(self, embed_dim: int, ffn_dim: int, *, key: jax.Array, std: float, out_std: float):
        kg, ku, kd = jax.random.split(key, 3)
        self.gate = ColumnLinear(embed_dim, (ffn_dim,), ("ffn",), key=kg, std=std)
        self.up = ColumnLinear(embed_dim, (ffn_dim,), ("ffn",), key=ku, std=std)
        self.down = RowLinear((ffn_dim,), ("ffn",), embed_dim, key=kd, std=out_std)

    def __call__(self, x: Float[Array, "B T D"], batch: dict) -> Float[Array, "B S D"]:
        return self.down(_swish_gate(self.gate(x), self.up(x)), batch)


class GeluMLP(nnx.Module):
    """down(gelu(up(x))) with biases and the tanh form of GELU. x[b, t, D] -> [b, s, D]."""

    def __init__(self, embed_dim: int, ffn_dim: int, *, key: jax.Array, std: float, out_std: float):
        ku, kd = jax.random.split(key)
        self.up = ColumnLinear(embed_dim, (ffn_dim,), ("ffn",), key=ku, std=std, bias=True)
        self.down = RowLinear((ffn_dim,), ("ffn",), embed_dim, key=kd, std=out_std, bias=True)

    def __call__(self, x: Float[Array, "B T D"], batch: dict) -> Float[Array, "B S D"]:
        return self.down(_gelu(self.up(x)), batch)


@computed_again
def _swish_gate(gate, x):
    return jax.nn.silu(gate) * x


@computed_again
def _gelu(x):
    return jax.nn.gelu(x, approximate=True)
