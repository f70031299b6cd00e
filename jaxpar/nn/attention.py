"""Grouped-query attention, heads split over `tensor`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxpar.layout import nearest
from jaxpar.nn import rotary
from jaxpar.nn.blockwise_attention import blockwise_attention
from jaxpar.nn.context_attention import attend
from jaxpar.nn.linear import ColumnLinear, RowLinear
from jaxpar.nn.norms import RMSNorm
from jaxpar.nn.parallel import settings
from jaxpar.nn.sight import Rule, Tokens

ATTENTION_KERNELS = ("xla", "cudnn", "blockwise")
"""XLA's own, which stores the matrix of scores; cuDNN's flash attention (GPUs, 16-bit types);
loops over blocks, which store no scores and run anywhere."""


def choose_kernel(name: str | None, platform: str, precision: str, context: int = 1) -> str:
    """`name`, one of ATTENTION_KERNELS; where None, cuDNN's for bf16 on GPUs, else XLA's or, where
    the sequence is split over `context` devices, blockwise.

    Raises ValueError for an unknown name, and for cuDNN's where it cannot run.

    >>> choose_kernel(None, "gpu", "bf16"), choose_kernel(None, "cpu", "bf16")
    ('cudnn', 'xla')
    """
    if name is None:
        if platform in ("gpu", "cuda") and precision == "bf16":
            return "cudnn"
        return "xla" if context == 1 else "blockwise"
    if name not in ATTENTION_KERNELS:
        raise ValueError(
            f"attention_kernel={name!r} is not a choice; {nearest(name, ATTENTION_KERNELS)}"
        )
    if name == "cudnn" and (platform not in ("gpu", "cuda") or precision != "bf16"):
        raise ValueError(
            f"attention_kernel='cudnn' needs GPUs and precision='bf16', found {platform} and "
            f"{precision}; use xla or blockwise"
        )
    return name


def document_mask(batch: dict) -> Bool[Array, "B 1 T T"] | None:
    """True where a query may see a key: same document. None where rows hold one document, and
    where attention makes its masks itself, block by block.

    The causal part is left to the attention kernel.
    """
    segments = batch.get("segment_ids")
    if segments is None or settings(batch).context.size > 1:
        return None
    mine, other = segments[:, None, :, None], segments[:, None, None, :]
    return (mine == other) & (mine >= 0)


def self_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    batch: dict,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention inside each document, over the context axis where the sequence is split.

    `window`: a query sees that many keys, its own among them; None: all before it.
    """
    s = settings(batch)
    if s.context.size == 1:
        return dense_attention(q, k, v, batch, window)
    queries = Tokens(batch["places"], batch.get("segment_ids"))
    keys = Tokens(batch["key_places"], batch.get("key_segments"))
    return attend(s.context, s.attention_kernel, Rule(True, window), q, k, v, queries, keys)


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    batch: dict,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention inside each document, on whole sequences; no communication.

    Uses `batch["mask"]` (see `document_mask`) where it is there, and the kernel that the settings
    say, one of ATTENTION_KERNELS. Padding (a negative segment) gives 0.
    """
    size = settings(batch).context.size
    if size > 1:
        raise ValueError(
            f"dense_attention sees this device's part of the row alone, and context={size} splits "
            "it; use jaxpar.nn.self_attention(q, k, v, batch)"
        )
    mask, kernel = batch.get("mask"), settings(batch).attention_kernel
    if kernel == "blockwise":
        return blockwise_attention(q, k, v, mask, is_causal=True, window=window)
    local = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=local, implementation=kernel
    )
    segments = batch.get("segment_ids")
    return out if segments is None else jnp.where(segments[..., None, None] >= 0, out, 0)


class Attention(nnx.Module):
    """Multi-head attention with num_kv_heads <= num_heads key and value heads.

    x[b, t, D] (whole sequence) -> [b, s, D]. Fewer kv heads than `tensor` are held in groups of
    devices (`jaxpar.splits`). A config with `sliding_window` limits what a query
    sees. Rotary where the batch has `rope` tables; `qk_norm` normalises each head's queries and
    keys (Dehghani et al., arXiv 2302.05442).
    """

    def __init__(
        self,
        config,
        *,
        key: jax.Array,
        std: float,
        out_std: float,
        bias: bool = False,
        out_bias: bool = False,
    ):
        kq, kk, kv, ko = jax.random.split(key, 4)
        d, n, k, h = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.query = ColumnLinear(d, (n, h), ("heads", "head_dim"), key=kq, std=std, bias=bias)
        self.key = ColumnLinear(d, (k, h), ("kv_heads", "head_dim"), key=kk, std=std, bias=bias)
        self.value = ColumnLinear(d, (k, h), ("kv_heads", "head_dim"), key=kv, std=std, bias=bias)
        self.out = RowLinear((n, h), ("heads", "head_dim"), d, key=ko, std=out_std, bias=out_bias)
        self.window = getattr(config, "sliding_window", None)
        norm = config.qk_norm
        self.query_norm = RMSNorm(h, dim="head_dim", epsilon=config.norm_eps) if norm else None
        self.key_norm = RMSNorm(h, dim="head_dim", epsilon=config.norm_eps) if norm else None

    def __call__(self, x: Float[Array, "B T D"], batch: dict) -> Float[Array, "B S D"]:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if "rope" in batch:
            q, k = rotary.rotate(q, *batch["rope"]), rotary.rotate(k, *batch["rope"])
        return self.out(self_attention(q, k, v, batch, self.window), batch)
