"""Attention in tiles on one device, in place of `jax.nn.dot_product_attention`; see `tiles`.

Operations are those of the whole matrix of scores, 2 products forward and 5 backward, also where a
mask hides half of it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.nn import tiles
from jaxpar.nn.parallel import vary_like
from jaxpar.nn.sight import Rule, Tokens
from jaxpar.nn.tiles import BLOCK


def blockwise_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "#B #N T S"] | None = None,
    *,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Array | None = None,
    block: int = BLOCK,
) -> Float[Array, "B T N H"]:
    """softmax(q . k / sqrt(H)) . v, as `jax.nn.dot_product_attention`; no communication.

    N is a multiple of K: query head n reads key and value head n // (N / K). `mask` is True where
    a query may see a key; `is_causal` hides keys that come after the query as well, `window` those
    that are `window` or more away, `segment_ids` [B, T] (where T = S) those of other documents. A
    query that may see no key gets zeros. Scores and sums are fp32. Raises ValueError for heads that
    do not divide and for blocks below 1.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> blockwise_attention(x, x, x, is_causal=True, block=2).shape
    (1, 4, 2, 8)
    """
    if block < 1:
        raise ValueError(f"block={block} is too small; use 1 or more")
    check_heads(q.shape[2], k.shape[2])
    for other in (k, v):
        q = vary_like(q, other)
    k, v = vary_like(k, q), vary_like(v, q)
    queries, keys = (
        Tokens(jnp.arange(x.shape[1], dtype=jnp.int32)[None], segment_ids) for x in (q, k)
    )
    return _attention(q, k, v, tiles.Mask(queries, keys, mask, Rule(is_causal, window)), block)


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuses query heads that key heads do not divide."""
    if heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads, not a multiple of the {kv_heads} of k and v; give a "
            f"multiple of {kv_heads}"
        )


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, mask, block):
    return _forward(q, k, v, mask, block)[0]


def _forward(q, k, v, mask, block):
    out, lse = tiles.forward(q, k, v, mask, tiles.Shape(block))
    return out, (q, k, v, mask, out, lse)


def _backward(block, saved, gradient):
    q, k, v, mask, out, lse = saved
    delta = jnp.sum(out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    dq, dk, dv = tiles.backward(
        q, k, v, lse, delta.swapaxes(1, 2), gradient, mask, tiles.Shape(block)
    )
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_attention.defvjp(_forward, _backward)
