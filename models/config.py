"""The config of a decoder: a frozen dataclass that every model of this folder uses."""

import dataclasses
from collections.abc import Callable, Mapping

from jaxpar.layout import nearest
from jaxpar.nn import RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder; `dataclasses.replace` makes variants."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    dropout: float = 0.0
    sliding_window: int | None = None

    def __post_init__(self):
        sizes = (
            "vocab_size",
            "num_layers",
            "embed_dim",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_dim",
            "max_seq_len",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a size; use 1 or more")
        if self.num_heads % self.num_kv_heads:
            fits = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}; num_kv_heads can be {fits}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window={self.sliding_window} hides every key; use 1 or more, or None"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} is not a probability below 1")


def choose(presets: Mapping[str, Callable[[], DecoderConfig]], family: str, name: str):
    """The config of a preset by name; ValueError lists the names there are."""
    if name not in presets:
        raise ValueError(f"{family} has no preset {name!r}; {nearest(name, presets)}")
    return presets[name]()
