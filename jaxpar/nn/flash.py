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

    `mask` bool [B, 1, T, S] or None. A query that sees nothing has 0 and -inf. `implementation`
    "cudnn" runs cuDNN's kernel; "xla" stores this block's scores.
    """
    if implementation == "xla":
        return _plain(q, k, v, mask, is_causal)
    out, lse, _ = _kernel(q, k, v, mask, is_causal, implementation)
    if mask is None:
        return out, lse
    sees = mask.any(
        axis=-1
    )  # the kernel hides with a large negative number, and shares out the rest
    return jnp.where(sees.swapaxes(1, 2)[..., None], out, 0), jnp.where(sees, lse, -jnp.inf)


def backward(q, k, v, out, lse, delta, gradient, mask, is_causal: bool, implementation: str):
    """(dq, dk, dv), where `out` and `lse` are those over all keys there are; see `tiles.backward`.

    Runs the kernel's own backward pass on them.
    """
    lse = jnp.where(lse == -jnp.inf, NOTHING_SEEN, lse)
    if implementation == "xla":
        return _plain_back(q, k, v, lse, delta, gradient, mask, is_causal)
    return _kernel(q, k, v, mask, is_causal, implementation)[2](out, lse, gradient)


def _kernel(q, k, v, mask, is_causal: bool, implementation: str):
    """(out, log-sum-exp, backward pass of another out, log-sum-exp and gradient) of JAX's kernel.

    Both numbers are found among what JAX keeps for the backward pass: the log-sum-exp that it
    returns has been rounded to the type of q.
    """

    def block(q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=is_causal, implementation=implementation,
            return_residual=True,
        )  # fmt: skip

    (own, rounded), pullback = jax.vjp(block, q, k, v)
    leaves, tree = jax.tree.flatten(pullback)
    stats = (q.shape[0], q.shape[2], q.shape[1])
    is_stats = [leaf.shape == stats and leaf.dtype == jnp.float32 for leaf in leaves]
    is_out = [leaf is own for leaf in leaves]
    if sum(is_stats) != 1 or sum(is_out) != 1:
        raise NotImplementedError(
            f"this JAX version keeps {sum(is_stats)} log-sum-exps and {sum(is_out)} outputs for "
            f"the backward pass of {implementation!r} attention, expected one of each"
        )

    def back(out, lse, gradient):
        both = zip(leaves, is_stats, is_out, strict=True)
        others = [lse if s else out if o else leaf for leaf, s, o in both]
        return jax.tree.unflatten(tree, others)((gradient, jnp.zeros_like(rounded)))

    return own, leaves[is_stats.index(True)], back


def _scores(q, k, mask, is_causal: bool):
    """fp32 [B, K, G, T, S], -inf where a query may not see a key; query heads N = K x G."""
    b, t, n, h = q.shape
    query = q.reshape(b, t, k.shape[2], n // k.shape[2], h)
    scores = _product("btkgh,bskh->bkgts", query, k) * h**-0.5
    if is_causal:
        scores = jnp.where(jnp.tri(t, k.shape[1], dtype=bool), scores, -jnp.inf)
    return scores if mask is None else jnp.where(mask[:, :, None], scores, -jnp.inf)


def _plain(q, k, v, mask, is_causal: bool):
    scores = _scores(q, k, mask, is_causal)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, NOTHING_SEEN, lse)[..., None])
    out = _product("bkgts,bskh->btkgh", weights.astype(v.dtype), v)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[0], q.shape[2], -1)


def _plain_back(q, k, v, lse, delta, gradient, mask, is_causal: bool):
    scores = _scores(q, k, mask, is_causal)
    lse, delta = (a.reshape(*scores.shape[:4], 1) for a in (lse, delta))
    shape = (*q.shape[:2], *scores.shape[1:3], q.shape[3])
    query, d_out = q.reshape(shape), gradient.reshape(shape)
    weights = jnp.exp(scores - lse)
    d_weights = _product("btkgh,bskh->bkgts", d_out, v)
    d_scores = weights * (d_weights - delta) * q.shape[3] ** -0.5
    weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
    dq = _product("bkgts,bskh->btkgh", d_scores, k).reshape(q.shape)
    dk = _product("bkgts,btkgh->bskh", d_scores, query)
    return dq, dk, _product("bkgts,btkgh->bskh", weights, d_out)


def _product(dims, left, right):
    return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)
