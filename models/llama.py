"""Llama: RMSNorm, rotary, grouped-query attention, SwiGLU (arXiv 2302.13971, 2407.21783).

Options: qk-norm, biases on query, key and value, tied embeddings, Llama-3 rotary scaling.
"""

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxpar import loss as losses
from jaxpar.models.config import DecoderConfig, choose
from jaxpar.nn import (
    Attention,
    Embedding,
    RMSNorm,
    RopeScaling,
    SwiGLU,
    document_mask,
    dropout,
    gather_sequence,
    stack,
    tables,
)

INIT_STD = 0.02


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x[b, s, D] between blocks."""

    def __init__(self, config: DecoderConfig, key: jax.Array):
        ka, km = jax.random.split(key)
        out_std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.attention_norm = RMSNorm(config.embed_dim, epsilon=config.norm_eps)
        self.attention = Attention(
            config, key=ka, std=INIT_STD, out_std=out_std, bias=config.qkv_bias
        )
        self.mlp_norm = RMSNorm(config.embed_dim, epsilon=config.norm_eps)
        self.mlp = SwiGLU(config.embed_dim, config.ffn_dim, key=km, std=INIT_STD, out_std=out_std)
        self.dropout = config.dropout

    def __call__(self, x: Float[Array, "B S D"], batch: dict) -> Float[Array, "B S D"]:
        h = self.attention(gather_sequence(self.attention_norm(x), batch), batch)
        x = x + dropout(h, self.dropout, batch, site=1)
        h = self.mlp(gather_sequence(self.mlp_norm(x), batch), batch)
        return x + dropout(h, self.dropout, batch, site=2)


class Llama(nnx.Module):
    """The decoder as jaxpar runs it: `prepare`, `embed`, `layers` with `block`, and `loss`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        ke, kl, kh = jax.random.split(rngs.params(), 3)
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.embed_dim, key=ke, std=INIT_STD)
        self.layers = stack(lambda key: Block(config, key), config.num_layers, kl)
        self.norm = RMSNorm(config.embed_dim, epsilon=config.norm_eps)
        self.head = (
            None
            if config.tie_embeddings
            else Embedding(config.vocab_size, config.embed_dim, key=kh, std=INIT_STD)
        )

    def prepare(self, batch: dict) -> dict:
        """Adds what all layers share: the rotary tables and the document mask."""
        c = self.config
        rope = tables(batch["positions"], c.head_dim, c.rope_theta, c.rope_scaling)
        mask = document_mask(batch)
        return {**batch, "rope": rope} | ({} if mask is None else {"mask": mask})

    def embed(self, batch: dict) -> Float[Array, "B S D"]:
        """tokens[b, t] -> x[b, s, D]."""
        return dropout(self.embedding(batch["tokens"], batch), self.config.dropout, batch, site=0)

    def block(self, layer: Block, x: Float[Array, "B S D"], batch: dict) -> Float[Array, "B S D"]:
        """One layer; `layer` has the structure of `layers` without the layers dim."""
        return layer(x, batch)

    def head_table(self) -> Float[Array, "V D"]:
        """The output table, this device's share of the vocabulary."""
        return (self.embedding if self.head is None else self.head).table[...]

    def logits(self, x: Float[Array, "B S D"], batch: dict) -> Float[Array, "B T V"]:
        """fp32 logits of this device's share of the vocabulary, whole sequence."""
        x = gather_sequence(self.norm(x), batch)
        return jax.numpy.einsum(
            "btd,vd->btv", x, self.head_table(), preferred_element_type=jax.numpy.float32
        )

    def token_losses(self, x: Float[Array, "B S D"], batch: dict) -> Float[Array, "B T"]:
        """fp32 loss of each token of this device, 0 where its weight is 0."""
        x, size = self.norm(x), self.config.vocab_size
        return losses.token_cross_entropy(x, self.head_table(), batch, size)

    def loss(self, x: Float[Array, "B S D"], batch: dict):
        """(weighted sum of next-token losses, sum of weights) of this device's rows."""
        return losses.cross_entropy(self.norm(x), self.head_table(), batch, self.config.vocab_size)


def loss(model: Llama, x: Float[Array, "B S D"], batch: dict):
    """The loss that `plan.value_and_grad` takes: (sum, count) from the last block's output x."""
    return model.loss(x, batch)


def tiny() -> DecoderConfig:
    """Bytes in, 0.2 million parameters: trains on a laptop's CPU in a minute."""
    return DecoderConfig(
        vocab_size=256,
        num_layers=4,
        embed_dim=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        ffn_dim=192,
        max_seq_len=32_768,
    )


def llama_1b() -> DecoderConfig:
    """Llama 3.2 1B: 1,235,814,400 parameters."""
    return _llama3(16, 2048, 32, 8192, head_dim=64, factor=32.0, tied=True)


def llama_3b() -> DecoderConfig:
    """Llama 3.2 3B: 3,212,749,824 parameters."""
    return _llama3(28, 3072, 24, 8192, head_dim=128, factor=32.0, tied=True)


def llama_8b() -> DecoderConfig:
    """Llama 3.1 8B: 8,030,261,248 parameters."""
    return _llama3(32, 4096, 32, 14336)


def llama_70b() -> DecoderConfig:
    """Llama 3.1 70B: 70,553,706,496 parameters."""
    return _llama3(80, 8192, 64, 28672)


def llama_405b() -> DecoderConfig:
    """Llama 3.1 405B: 405,853,388,800 parameters."""
    return _llama3(126, 16384, 128, 53248)


def _llama3(layers, embed, heads, ffn, *, head_dim=128, factor=8.0, tied=False) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128_256,
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        ffn_dim=ffn,
        max_seq_len=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=factor),
        tie_embeddings=tied,
    )


PRESETS = {
    "tiny": tiny,
    "1b": llama_1b,
    "3b": llama_3b,
    "8b": llama_8b,
    "70b": llama_70b,
    "405b": llama_405b,
}
Model = Llama


def preset(name: str, **changes) -> DecoderConfig:
    """A preset's config by its name, such as "8b", with fields replaced by `changes`."""
    return dataclasses.replace(choose(PRESETS, "llama", name), **changes)
