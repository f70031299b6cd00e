"""Attention in loops over blocks of queries and keys: exact, and no matrix of scores is stored.

The one idea: a softmax over all keys can be carried along from block to block of keys as a maximum,
a sum and a weighted sum of values (arXiv 2112.05682; arXiv 2205.14135, algorithm 1). The backward
pass computes the scores again from the saved log-sum-exp. Memory beyond inputs and outputs is one
fp32 number per query and head, and some blocks; operations are those of the whole matrix of scores,
2 products forward and 5 backward, also where a mask hides half of it.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxpar.nn.parallel import vary_like

BLOCK = 256
"""Queries and keys of a block."""


def blockwise_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "#B #N T S"] | None = None,
    *,
    is_causal: bool = False,
    block: int = BLOCK,
) -> Float[Array, "B T N H"]:
    """softmax(q . k / sqrt(H)) . v, as `jax.nn.dot_product_attention`; no communication.

    N is a multiple of K: query head n reads key and value head n // (N / K). `mask` is True where
    a query may see a key; `is_causal` hides keys that come after the query as well. A query that
    may see no key gets zeros. Scores and sums are fp32. Raises
    ValueError for heads that do not divide and for blocks below 1.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> blockwise_attention(x, x, x, is_causal=True, block=2).shape
    (1, 4, 2, 8)
    """
    if block < 1:
        raise ValueError(f"block={block} is too small; use 1 or more")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, not a multiple of the {k.shape[2]} of k and v; give a "
            f"multiple of {k.shape[2]}"
        )
    for other in (k, v):
        q = vary_like(q, other)
    k, v = vary_like(k, q), vary_like(v, q)
    return _attention(q, k, v, mask, is_causal, block)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q, k, v, mask, is_causal, block):
    return _forward(q, k, v, mask, is_causal, block)[0]


def _forward(q, k, v, mask, is_causal, block):
    grid = _Grid(q.shape, k.shape, min(block, q.shape[1]), min(block, k.shape[1]), is_causal)
    qs, ks, vs, masks = grid.queries(q), grid.keys(k), grid.keys(v), grid.masks(mask)

    def row(carry, i):
        query = _take(qs, i, grid.rows, axis=1)

        def column(sums, j):
            top, total, weighted = sums
            scores = grid.scores(query, _take(ks, j, grid.columns, axis=1), masks, i, j)
            new = jnp.maximum(top, scores.max(axis=-1))
            finite = jnp.where(new == -jnp.inf, 0, new)
            weights, decay = jnp.exp(scores - finite[..., None]), jnp.exp(top - finite)
            total = total * decay + weights.sum(axis=-1)
            values = _take(vs, j, grid.columns, axis=1)
            weighted *= decay[..., None]
            weighted += _product("bkgts,bskh->bkgth", weights.astype(v.dtype), values)
            return (new, total, weighted), None

        zeros = vary_like(jnp.zeros(grid.sums, jnp.float32), q)
        start = (zeros - jnp.inf, zeros, vary_like(jnp.zeros(grid.results, jnp.float32), q))
        (top, total, weighted), _ = lax.scan(column, start, jnp.arange(grid.num_columns))
        seen = total > 0
        total = jnp.where(seen, total, 1)
        result = jnp.where(seen[..., None], weighted / total[..., None], 0)
        lse = jnp.where(seen, top + jnp.log(total), jnp.inf)
        result = jnp.moveaxis(result, 3, 1).astype(q.dtype)
        return (_put(carry[0], result, i, axis=1), _put(carry[1], lse, i, axis=3)), None

    lse = vary_like(jnp.zeros((*grid.sums[:3], qs.shape[1]), jnp.float32), q)
    (out, lse), _ = lax.scan(row, (jnp.zeros_like(qs), lse), jnp.arange(grid.num_rows))
    out = grid.whole(out, q)
    return out, (q, k, v, mask, out, lse)


def _backward(is_causal, block, saved, gradient):
    q, k, v, mask, out, lse = saved
    grid = _Grid(q.shape, k.shape, min(block, q.shape[1]), min(block, k.shape[1]), is_causal)
    qs, ks, vs, masks = grid.queries(q), grid.keys(k), grid.keys(v), grid.masks(mask)
    deltas = jnp.sum(out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1, keepdims=True)
    deltas, gradients = grid.queries(deltas), grid.queries(gradient)

    def row(carry, i):
        query, d_out = (_take(a, i, grid.rows, axis=1) for a in (qs, gradients))
        delta = jnp.moveaxis(_take(deltas, i, grid.rows, axis=1)[..., 0], 1, 3)
        row_lse = _take(lse, i, grid.rows, axis=3)

        def column(sums, j):
            dq, dk, dv = sums
            key, value = (_take(a, j, grid.columns, axis=1) for a in (ks, vs))
            weights = jnp.exp(grid.scores(query, key, masks, i, j) - row_lse[..., None])
            d_weights = _product("btkgh,bskh->bkgts", d_out, value)
            d_scores = (weights * (d_weights - delta[..., None]) * grid.scale).astype(q.dtype)
            weights = weights.astype(q.dtype)
            dq += _product("bkgts,bskh->btkgh", d_scores, key)
            dk = _add(dk, _product("bkgts,btkgh->bskh", d_scores, query), j, axis=1)
            dv = _add(dv, _product("bkgts,btkgh->bskh", weights, d_out), j, axis=1)
            return (dq, dk, dv), None

        dq = vary_like(jnp.zeros(query.shape, jnp.float32), q)
        (dq, dk, dv), _ = lax.scan(column, (dq, *carry[1:]), jnp.arange(grid.num_columns))
        return (_put(carry[0], dq.astype(q.dtype), i, axis=1), dk, dv), None

    zeros = vary_like(jnp.zeros(ks.shape, jnp.float32), q)
    (dq, dk, dv), _ = lax.scan(row, (jnp.zeros_like(qs), zeros, zeros), jnp.arange(grid.num_rows))
    dk, dv = dk[:, : k.shape[1]].astype(k.dtype), dv[:, : k.shape[1]].astype(v.dtype)
    return grid.whole(dq, q), dk, dv, None


_attention.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The scores of q[B, T, N, H] and k[B, S, K, H], in blocks of `rows` x `columns`.

    Query heads that share a key head stand in a group: N = K x G.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    rows: int
    columns: int
    is_causal: bool

    @property
    def num_rows(self) -> int:
        return -(-self.q[1] // self.rows)

    @property
    def num_columns(self) -> int:
        return -(-self.k[1] // self.columns)

    @property
    def sums(self) -> tuple[int, ...]:
        """[B, K, G, rows]"""
        return self.q[0], self.k[2], self.q[2] // self.k[2], self.rows

    @property
    def results(self) -> tuple[int, ...]:
        """[B, K, G, rows, H]"""
        return *self.sums, self.q[3]

    @property
    def scale(self) -> float:
        return self.q[3] ** -0.5

    def queries(self, x):
        """x[B, T, N, H] -> [B, T padded to whole blocks, K, G, H]"""
        x = _pad(x, self.num_rows * self.rows, axis=1)
        return x.reshape(*x.shape[:2], *self.sums[1:3], x.shape[-1])

    def keys(self, x):
        """x[B, S, K, H] -> [B, S padded to whole blocks, K, H]"""
        return _pad(x, self.num_columns * self.columns, axis=1)

    def masks(self, mask):
        """mask[B, N, T, S] -> [B, K, G, T padded, S padded], or with dims of 1 for B, K, G."""
        if mask is None:
            return None
        mask = _pad(mask, self.num_rows * self.rows, axis=2)
        mask = _pad(mask, self.num_columns * self.columns, axis=3)
        heads = (1, 1) if mask.shape[1] == 1 else self.sums[1:3]
        return mask.reshape(mask.shape[0], *heads, *mask.shape[2:])

    def whole(self, x, like):
        """The reverse of `queries`."""
        return x.reshape(*x.shape[:2], *like.shape[2:])[:, : like.shape[1]]

    def scores(self, query, key, masks, i, j):
        """[B, K, G, rows, columns] of one block; -inf where the query may not see the key."""
        scores = _product("btkgh,bskh->bkgts", query, key) * self.scale
        rows = i * self.rows + jnp.arange(self.rows)
        columns = j * self.columns + jnp.arange(self.columns)
        seen = jnp.broadcast_to(columns < self.k[1], scores.shape[-2:])
        if self.is_causal:
            seen &= rows[:, None] >= columns
        if masks is not None:
            seen &= _take(_take(masks, i, self.rows, axis=3), j, self.columns, axis=4)
        return jnp.where(seen, scores, -jnp.inf)


def _product(dims, left, right):
    return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)


def _take(x, i, size, *, axis):
    """Block number i of `size` elements along `axis`."""
    return lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _put(x, part, i, *, axis):
    """x with block number i replaced by `part`."""
    return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], axis)


def _add(x, part, i, *, axis):
    return _put(x, _take(x, i, part.shape[axis], axis=axis) + part, i, axis=axis)


def _pad(x, length, axis):
    """x with zeros after its end, `length` along `axis`."""
    missing = length - x.shape[axis]
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x
