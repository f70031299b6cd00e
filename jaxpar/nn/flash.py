"""One block of attention by a library's kernel, forward and backward, to be merged with others.

The one idea: with the log-sum-exp over all keys in place of the block's own, a flash kernel's
backward pass gives exactly this block's part of the gradients (arXiv 2205.14135, algorithm 4).
"""

import jax
import jax.numpy as jnp

NOTHING_SEEN = 1e30
"""Log-sum-exp of a query that sees nothing, in the backward pass: every weight becomes 0."""


def forward(q, k, v, mask, is_causal: bool, implementation: str):
    """(out [B, T, N, H], log-sum-exp fp32 [B, N, T]) of q against these keys.

    `mask` bool [B, 1, T, S] or None. A query that sees nothing has 0 and -inf.
    """
    out, lse = jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=is_causal, implementation=implementation,
        return_residual=True,
    )  # fmt: skip
    lse = lse.astype(jnp.float32).swapaxes(1, 2)
    if mask is None:
        return out, lse
    sees = mask.any(
        axis=-1
    )  # kernels hide with a large negative number, and share out what is left
    return jnp.where(sees.swapaxes(1, 2)[..., None], out, 0), jnp.where(sees, lse, -jnp.inf)


def backward(q, k, v, out, lse, delta, gradient, mask, is_causal: bool, implementation: str):
    """(dq, dk, dv), where `out` and `lse` are those over all keys there are; see `tiles.backward`.

    `implementation` "cudnn" runs cuDNN's backward kernel on them; "xla" stores this block's scores.
    """
    lse = jnp.where(lse == -jnp.inf, NOTHING_SEEN, lse)
    if implementation == "xla":
        return _plain(q, k, v, lse, delta, gradient, mask, is_causal)

    def block(q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=is_causal, implementation=implementation,
            return_residual=True,
        )  # fmt: skip

    (own, own_lse), pullback = jax.vjp(block, q, k, v)
    leaves, tree = jax.tree.flatten(pullback)
    stats = (q.shape[0], q.shape[2], q.shape[1])
    is_stats = [leaf.shape == stats and leaf.dtype == jnp.float32 for leaf in leaves]
    is_out = [leaf is own for leaf in leaves]
    if sum(is_stats) != 1 or sum(is_out) != 1:
        raise NotImplementedError(
            f"this JAX version keeps {sum(is_stats)} log-sum-exps and {sum(is_out)} outputs for "
            f"the backward pass of {implementation!r} attention, expected one of each"
        )
    both = zip(leaves, is_stats, is_out, strict=True)
    leaves = [lse if s else out if o else leaf for leaf, s, o in both]
    return jax.tree.unflatten(tree, leaves)((gradient, jnp.zeros_like(own_lse)))


def _plain(q, k, v, lse, delta, gradient, mask, is_causal: bool):
    b, t, n, h = q.shape
    kv = k.shape[2]
    query, d_out = (a.reshape(b, t, kv, n // kv, h) for a in (q, gradient))
    lse, delta = (a.reshape(b, kv, n // kv, t, 1) for a in (lse, delta))
    product = lambda *a: jnp.einsum(*a, preferred_element_type=jnp.float32)  # noqa: E731
    scores = product("btkgh,bskh->bkgts", query, k) * h**-0.5
    if is_causal:
        scores = jnp.where(jnp.tri(t, k.shape[1], dtype=bool), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
    weights = jnp.exp(scores - lse)
    d_scores = weights * (product("btkgh,bskh->bkgts", d_out, v) - delta) * h**-0.5
    weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
    dq = product("bkgts,bskh->btkgh", d_scores, k).reshape(q.shape)
    dk = product("bkgts,btkgh->bskh", d_scores, query)
    return dq, dk, product("bkgts,btkgh->bskh", weights, d_out)
