"""GPT-2: LayerNorm, learned positions, biases everywhere, GELU, tied embeddings."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar import loss as losses
from jaxpar.models.config import DecoderConfig, choose
from jaxpar.nn import (
    Attention,
    Embedding,
    GeluMLP,
    LayerNorm,
    document_mask,
    dropout,
    gather_sequence,
    local_sequence,
    normal,
    param,
    stack,
)

INIT_STD = 0.02


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x[b, s, D] between blocks."""

    def __init__(self, config: DecoderConfig, key: jax.Array):
        ka, km = jax.random.split(key)
        out_std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.attention_norm = LayerNorm(config.embed_dim, epsilon=config.norm_eps)
        self.attention = Attention(
            config, key=ka, std=INIT_STD, out_std=out_std, bias=True, out_bias=True
        )
        self.mlp_norm = LayerNorm(config.embed_dim, epsilon=config.norm_eps)
        self.mlp = GeluMLP(config.embed_dim, config.ffn_dim, key=km, std=INIT_STD, out_std=out_std)
        self.dropout = config.dropout

    def __call__(self, x: Float[Array, "B S D"], batch: dict) -> Float[Array, "B S D"]:
        h = self.attention(gather_sequence(self.attention_norm(x), batch), batch)
        x = x + dropout(h, self.dropout, batch, site=1)
        h = self.mlp(gather_sequence(self.mlp_norm(x), batch), batch)
        return x + dropout(h, self.dropout, batch, site=2)


class GPT2(nnx.Module):
    """The decoder as jaxpar runs it: `prepare`, `embed`, `layers` with `block`, and `loss`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        ke, kp, kl, kh = jax.random.split(rngs.params(), 4)
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.embed_dim, key=ke, std=INIT_STD)
        self.positions = param(
            normal(kp, (config.max_seq_len, config.embed_dim), INIT_STD), ("positions", "embed")
        )
        self.layers = stack(lambda key: Block(config, key), config.num_layers, kl)
        self.norm = LayerNorm(config.embed_dim, epsilon=config.norm_eps)
        self.head = (
            None
            if config.tie_embeddings
            else Embedding(config.vocab_size, config.embed_dim, key=kh, std=INIT_STD)
        )

    def prepare(self, batch: dict) -> dict:
        """Adds what all layers share: the document mask."""
        mask = document_mask(batch)
        return dict(batch) if mask is None else {**batch, "mask": mask}

    def embed(self, batch: dict) -> Float[Array, "B S D"]:
        """tokens[b, t], positions[b, t] -> x[b, s, D]."""
        x = self.embedding(batch["tokens"], batch)
        x = x + jnp.take(self.positions[...], local_sequence(batch["positions"], batch), axis=0)
        return dropout(x, self.config.dropout, batch, site=0)

    def block(self, layer: Block, x: Float[Array, "B S D"], batch: dict) -> Float[Array, "B S D"]:
        """One layer; `layer` has the structure of `layers` without the layers dim."""
        return layer(x, batch)

    def head_table(self) -> Float[Array, "V D"]:
        """The output table, this device's share of the vocabulary."""
        return (self.embedding if self.head is None else self.head).table[...]

    def logits(self, x: Float[Array, "B S D"], batch: dict) -> Float[Array, "B T V"]:
        """fp32 logits of this device's share of the vocabulary, whole sequence."""
        x = gather_sequence(self.norm(x), batch)
        return jnp.einsum("btd,vd->btv", x, self.head_table(), preferred_element_type=jnp.float32)

    def token_losses(self, x: Float[Array, "B S D"], batch: dict) -> Float[Array, "B T"]:
        """fp32 loss of each token of this device, 0 where its weight is 0."""
        x, size = self.norm(x), self.config.vocab_size
        return losses.token_cross_entropy(x, self.head_table(), batch, size)

    def loss(self, x: Float[Array, "B S D"], batch: dict):
        """(weighted sum of next-token losses, sum of weights) of this device's rows."""
        return losses.cross_entropy(self.norm(x), self.head_table(), batch, self.config.vocab_size)


def loss(model: GPT2, x: Float[Array, "B S D"], batch: dict):
    """The loss that `plan.value_and_grad` takes: (sum, count) from the last block's output x."""
    return model.loss(x, batch)


def _gpt2(layers: int, embed: int, heads: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=50_257,
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        ffn_dim=4 * embed,
        max_seq_len=1024,
        tie_embeddings=True,
    )


def tiny() -> DecoderConfig:
    """Bytes in, 0.2 million parameters: for tests and a laptop's CPU."""
    return dataclasses.replace(_gpt2(4, 64, 8), vocab_size=256)


def gpt2_124m() -> DecoderConfig:
    """GPT-2 small: 124,439,808 parameters."""
    return _gpt2(12, 768, 12)


def gpt2_355m() -> DecoderConfig:
    """GPT-2 medium: 354,823,168 parameters."""
    return _gpt2(24, 1024, 16)


def gpt2_774m() -> DecoderConfig:
    """GPT-2 large: 774,030,080 parameters."""
    return _gpt2(36, 1280, 20)


def gpt2_1558m() -> DecoderConfig:
    """GPT-2 XL: 1,557,611,200 parameters."""
    return _gpt2(48, 1600, 25)


PRESETS = {
    "tiny": tiny,
    "124m": gpt2_124m,
    "355m": gpt2_355m,
    "774m": gpt2_774m,
    "1558m": gpt2_1558m,
}
Model = GPT2


def preset(name: str, **changes) -> DecoderConfig:
    """A preset's config by its name, such as "124m", with fields replaced by `changes`."""
    return dataclasses.replace(choose(PRESETS, "gpt2", name), **changes)
