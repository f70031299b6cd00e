"""Attention in loops over tiles of queries and keys: exact, and no matrix of scores is stored.

The one idea: a softmax over all keys can be carried along from tile to tile of keys as a maximum,
a sum and a weighted sum of values (arXiv 2112.05682; arXiv 2205.14135, algorithm 1). The backward
pass computes the scores again from the saved log-sum-exp. Memory beyond inputs and outputs is one
fp32 number per query and head, and some tiles. Tiles in which no query sees a key are left out.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxpar.nn.parallel import vary_like
from jaxpar.nn.sight import Rule, Tokens, seen

BLOCK = 256
"""Queries and keys of a tile, at most."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """What queries see of keys: a rule on tokens, and perhaps a mask [B, N, T, S] besides."""

    queries: Tokens | None
    keys: Tokens | None
    array: Bool[Array, "#B #N T S"] | None = None
    rule: Rule = dataclasses.field(default=Rule(), metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Shape:
    """How tiles are cut, and whether those without anything to see are left out.

    `block`: queries and keys of a tile. `skip`: a branch around each tile.
    """

    block: int = BLOCK
    skip: bool = False


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    shape: Shape,
    dtype=None,
):
    """(out [B, T, N, H] in `dtype`, log-sum-exp of the scores, fp32 [B, N, T]).

    A query that sees nothing has 0 and -inf. Query head n reads key head n // (N / K).
    """
    grid = _Grid.of(q, k, shape)
    qs, ks, vs = grid.queries(q), grid.keys(k), grid.keys(v)
    arrays, dtype = grid.mask(mask), dtype or q.dtype

    def row(carry, i):
        query = _take(qs, i, grid.rows, axis=1)

        def column(sums, j):
            visible = grid.visible(arrays, i, j)

            def add(sums):
                top, total, weighted = sums
                scores = grid.scores(query, _take(ks, j, grid.columns, axis=1), visible)
                new = jnp.maximum(top, scores.max(axis=-1))
                finite = jnp.where(new == -jnp.inf, 0, new)
                weights, decay = jnp.exp(scores - finite[..., None]), jnp.exp(top - finite)
                total = total * decay + weights.sum(axis=-1)
                values = _take(vs, j, grid.columns, axis=1)
                weighted *= decay[..., None]
                weighted += _product("bkgts,bskh->bkgth", weights.astype(v.dtype), values)
                return new, total, weighted

            return grid.where_seen(visible, add, sums), None

        zeros = vary_like(jnp.zeros(grid.sums, jnp.float32), q)
        start = (zeros - jnp.inf, zeros, vary_like(jnp.zeros(grid.results, jnp.float32), q))
        (top, total, weighted), _ = lax.scan(column, start, jnp.arange(grid.num_columns))
        has = total > 0
        total = jnp.where(has, total, 1)
        result = jnp.where(has[..., None], weighted / total[..., None], 0)
        lse = jnp.where(has, top + jnp.log(total), -jnp.inf)
        result = jnp.moveaxis(result, 3, 1).astype(dtype)
        return (_put(carry[0], result, i, axis=1), _put(carry[1], lse, i, axis=3)), None

    lse = vary_like(jnp.zeros((*grid.sums[:3], qs.shape[1]), jnp.float32), q)
    start = (jnp.zeros_like(qs, dtype), lse)
    (out, lse), _ = lax.scan(row, start, jnp.arange(grid.num_rows))
    return grid.whole(out, q), lse.reshape(q.shape[0], q.shape[2], -1)[..., : q.shape[1]]


def backward(q, k, v, lse, delta, gradient, mask: Mask, shape: Shape, dtype=None):
    """(dq in `dtype`, dk and dv in fp32), of the part of the softmax that these keys have.

    `lse` is the log-sum-exp over all keys there are, `delta` the sum of out x gradient over
    head_dim, both fp32 [B, N, T] (arXiv 2205.14135, algorithm 4).
    """
    grid = _Grid.of(q, k, shape)
    qs, ks, vs = grid.queries(q), grid.keys(k), grid.keys(v)
    arrays, gradients, dtype = grid.mask(mask), grid.queries(gradient), dtype or q.dtype
    lse, delta = grid.numbers(jnp.where(lse == -jnp.inf, jnp.inf, lse)), grid.numbers(delta)

    def row(carry, i):
        query, d_out = (_take(a, i, grid.rows, axis=1) for a in (qs, gradients))
        row_lse, row_delta = (_take(a, i, grid.rows, axis=3) for a in (lse, delta))

        def column(sums, j):
            visible = grid.visible(arrays, i, j)

            def add(sums):
                dq, dk, dv = sums
                key, value = (_take(a, j, grid.columns, axis=1) for a in (ks, vs))
                weights = jnp.exp(grid.scores(query, key, visible) - row_lse[..., None])
                d_weights = _product("btkgh,bskh->bkgts", d_out, value)
                d_scores = (weights * (d_weights - row_delta[..., None]) * grid.scale).astype(
                    q.dtype
                )
                weights = weights.astype(q.dtype)
                dq += _product("bkgts,bskh->btkgh", d_scores, key)
                dk = _add(dk, _product("bkgts,btkgh->bskh", d_scores, query), j, axis=1)
                dv = _add(dv, _product("bkgts,btkgh->bskh", weights, d_out), j, axis=1)
                return dq, dk, dv

            return grid.where_seen(visible, add, sums), None

        dq = vary_like(jnp.zeros(query.shape, jnp.float32), q)
        (dq, dk, dv), _ = lax.scan(column, (dq, *carry[1:]), jnp.arange(grid.num_columns))
        return (_put(carry[0], dq.astype(dtype), i, axis=1), dk, dv), None

    zeros = vary_like(jnp.zeros(ks.shape, jnp.float32), q)
    start = (jnp.zeros_like(qs, dtype), zeros, zeros)
    (dq, dk, dv), _ = lax.scan(row, start, jnp.arange(grid.num_rows))
    return grid.whole(dq, q), dk[:, : k.shape[1]], dv[:, : k.shape[1]]


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The scores of q[B, T, N, H] and k[B, S, K, H], in tiles of `rows` x `columns`.

    Query heads that share a key head stand in a group: N = K x G.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    rows: int
    columns: int
    skip: bool

    @classmethod
    def of(cls, q, k, shape: Shape) -> "_Grid":
        rows, columns = min(shape.block, q.shape[1]), min(shape.block, k.shape[1])
        return cls(q.shape, k.shape, rows, columns, shape.skip)

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
        """x[B, T, N, H] -> [B, T padded to whole tiles, K, G, H]"""
        x = _pad(x, self.num_rows * self.rows, axis=1)
        return x.reshape(*x.shape[:2], *self.sums[1:3], x.shape[-1])

    def keys(self, x):
        """x[B, S, K, H] -> [B, S padded to whole tiles, K, H]"""
        return _pad(x, self.num_columns * self.columns, axis=1)

    def numbers(self, x):
        """x[B, N, T] -> [B, K, G, T padded to whole tiles]"""
        x = _pad(x, self.num_rows * self.rows, axis=2)
        return x.reshape(x.shape[0], *self.sums[1:3], x.shape[-1])

    def mask(self, mask: Mask) -> Mask:
        """With everything padded to whole tiles; the array as [B, K, G, T, S]."""
        rows, columns, array = self.num_rows * self.rows, self.num_columns * self.columns, None
        if mask.array is not None:
            array = _pad(_pad(mask.array, rows, axis=2), columns, axis=3)
            heads = (1, 1) if array.shape[1] == 1 else self.sums[1:3]
            array = array.reshape(array.shape[0], *heads, *array.shape[2:])
        queries = mask.queries and mask.queries.padded(rows)
        return Mask(queries, mask.keys and mask.keys.padded(columns), array, mask.rule)

    def whole(self, x, like):
        """The reverse of `queries`."""
        return x.reshape(*x.shape[:2], *like.shape[2:])[:, : like.shape[1]]

    def visible(self, mask: Mask, i, j):
        """bool [B, K, G, rows, columns] of one tile, or with dims of 1."""
        rows = i * self.rows + jnp.arange(self.rows)
        columns = j * self.columns + jnp.arange(self.columns)
        there = (rows < self.q[1])[:, None] & (columns < self.k[1])
        visible = there[None, None, None]
        if mask.queries is not None:
            queries = mask.queries.part(i * self.rows, self.rows)
            by_rule = seen(mask.rule, queries, mask.keys.part(j * self.columns, self.columns))
            visible = visible if by_rule is None else visible & by_rule[:, None, None]
        if mask.array is not None:
            visible &= _take(_take(mask.array, i, self.rows, axis=3), j, self.columns, axis=4)
        return visible

    def where_seen(self, visible, function, sums):
        """function(sums), left out where nothing is seen."""
        if not self.skip:
            return function(sums)
        return lax.cond(visible.any(), function, lambda sums: sums, sums)

    def scores(self, query, key, visible):
        """[B, K, G, rows, columns] of one tile; -inf where the query may not see the key."""
        scores = _product("btkgh,bskh->bkgts", query, key) * self.scale
        return jnp.where(visible, scores, -jnp.inf)


def _product(dims, left, right):
    return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)


def _take(x, i, size, *, axis):
    """Tile number i of `size` elements along `axis`."""
    return lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _put(x, part, i, *, axis):
    """x with tile number i replaced by `part`."""
    return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], axis)


def _add(x, part, i, *, axis):
    return _put(x, _take(x, i, part.shape[axis], axis=axis) + part, i, axis=axis)


def _pad(x, length, axis):
    """x with zeros after its end, `length` along `axis`."""
    missing = length - x.shape[axis]
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x
