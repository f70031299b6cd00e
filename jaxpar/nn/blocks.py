"""One block of a ring's attention: this device's queries against one member's keys.

The one idea: a block is computed by a kernel, all at once or in the parts that can be seen at all,
and what it adds to the softmax is merged by its log-sum-exp, in fp32.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.nn import flash, tiles
from jaxpar.nn.order import Context
from jaxpar.nn.parallel import zero_after
from jaxpar.nn.sight import Rule, Tokens, seen


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is known of the ring before anything runs.

    `kernel`: blockwise, or one of `flash` (cudnn, xla). `in_order`: tokens lie in the context's
    order, where a device's come in the order of their places unless it is by document.
    """

    context: Context
    kernel: str = "blockwise"
    rule: Rule = Rule()
    in_order: bool = True

    @property
    def size(self) -> int:
        """Members of the ring."""
        return self.context.ring

    def hop(self, x):
        """x[...] to the next member, from the one before: a permutation of x's bytes."""
        step, size = self.context.ulysses, self.context.size
        pairs = [(i, (i + step) % size) for i in range(size)]
        return lax.ppermute(x, self.context.axis, pairs)

    def after(self, x, other):
        """x, which exists only once `other` does where permutations must not overlap."""
        return x + zero_after(other).astype(x.dtype) if self.context.one_at_a_time else x

    def member(self, back=0):
        """The number of this member, or of the one `back` places before it."""
        if self.size == 1:
            return 0
        return (lax.axis_index(self.context.axis) // self.context.ulysses - back) % self.size


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Queries and keys of a block that may see each other: `size` from `row` and `column` on.

    `is_causal`: each query sees the keys up to its own number. `masked`: what is seen depends on
    the tokens, and may be nothing. `needed`: whether any is, None where always or the mask says.
    """

    row: int | jax.Array
    column: int | jax.Array
    size: int
    is_causal: bool
    masked: bool
    needed: jax.Array | None = None


def _pairs(ring: Ring, t: int, back, queries: Tokens) -> list[_Pair]:
    """The parts of the block of the member `back` places before that a kernel has to compute.

    In zigzag order that is half of it, the same for every member: the later half of the queries
    sees the earlier half of the keys, and one half each sees another, depending on who is first.
    """
    masked = queries.segments is not None or ring.rule.window is not None
    ordered = ring.rule.is_causal and ring.in_order and ring.context.order != "document"
    if isinstance(back, int) and back == 0:
        return [_Pair(0, 0, t, ordered, masked or ring.rule.is_causal and not ordered)]
    before = ring.member(back) < ring.member()
    if ordered and ring.context.order == "zigzag":
        half = t // 2
        other = jnp.where(before, 0, half)
        return [_Pair(half, 0, half, False, masked), _Pair(other, other, half, False, masked)]
    if ordered and not masked:
        return [_Pair(0, 0, t, False, False, before)]
    return [_Pair(0, 0, t, False, masked or ring.rule.is_causal)]


def check_even(ring: Ring, t: int, queries: Tokens) -> None:
    """Refuses blocks that cuDNN does not take, of a member that holds `t` tokens of a row."""
    for pair in _pairs(ring, t, 0, queries) + (
        _pairs(ring, t, 1, queries) if ring.size > 1 else []
    ):
        if ring.kernel == "cudnn" and pair.masked and pair.size % 2:
            raise ValueError(
                f"cuDNN takes documents and windows in blocks of an even number of tokens, and "
                f"{ring.context.axis}={ring.context.size} gives blocks of {pair.size}; use a "
                f"sequence that is a multiple of {2 * ring.context.multiple}, or the kernel "
                "'blockwise'"
            )


def add_block(ring: Ring, q, queries: Tokens, keys: Tokens, sums, kv, back):
    """sums (out fp32, log-sum-exp) with the keys of the member `back` places before."""
    t = q.shape[1]
    keys = keys.part(ring.member(back) * t, t)
    if ring.kernel == "blockwise":
        mask = tiles.Mask(queries, keys, rule=ring.rule)
        found = tiles.forward(q, *kv, mask, _tile_shape(ring, t), jnp.float32)
        return _merge(sums, *found)
    for pair in _pairs(ring, t, back, queries):
        rows, columns = _cut(pair, queries, keys)

        def block(sums, pair=pair, mask=None):
            mine = _take(pair.row, pair.size, q)
            k, v = _take(pair.column, pair.size, *kv)
            found = flash.forward(*mine, k, v, mask, pair.is_causal, ring.kernel)
            return _put_sums(sums, pair.row, _merge(_take_sums(sums, pair), *found))

        sums = _where_seen(ring, pair, rows, columns, block, sums)
    return sums


def add_block_back(ring: Ring, saved, queries: Tokens, keys: Tokens, dq, kv, back):
    """(dq with what this block adds, this block's gradient of kv, fp32)."""
    q, out, lse, delta, gradient = saved
    t = q.shape[1]
    keys = keys.part(ring.member(back) * t, t)
    if ring.kernel == "blockwise":
        mask = tiles.Mask(queries, keys, rule=ring.rule)
        part, dk, dv = tiles.backward(
            q, *kv, lse, delta, gradient, mask, _tile_shape(ring, t), jnp.float32
        )
        return dq + part, jnp.stack([dk, dv])
    sums = (dq, jnp.zeros_like(kv, jnp.float32))
    for pair in _pairs(ring, t, back, queries):
        rows, columns = _cut(pair, queries, keys)

        def block(sums, pair=pair, mask=None):
            mine, result, d_out = _take(pair.row, pair.size, q, out, gradient)
            numbers = (lax.dynamic_slice_in_dim(a, pair.row, pair.size, 2) for a in (lse, delta))
            k, v = _take(pair.column, pair.size, *kv)
            found = flash.backward(
                mine, k, v, result, *numbers, d_out, mask, pair.is_causal, ring.kernel
            )
            dq, dkv = sums
            dq = _accumulate(dq, found[0], pair.row, 1)
            return dq, _accumulate(dkv, jnp.stack(found[1:]), pair.column, 2)

        sums = _where_seen(ring, pair, rows, columns, block, sums)
    return sums


def _where_seen(ring: Ring, pair: _Pair, rows: Tokens, columns: Tokens, block, sums):
    """block(sums), with a mask where one is needed, and left out where it hides everything."""
    if pair.needed is not None:
        return lax.cond(pair.needed, block, lambda sums: sums, sums)
    if not pair.masked:
        return block(sums)
    mask = seen(ring.rule, rows, columns)[:, None]
    if pair.is_causal:
        return block(sums, mask=mask)
    return lax.cond(mask.any(), lambda sums: block(sums, mask=mask), lambda sums: sums, sums)


def _tile_shape(ring: Ring, t: int) -> tiles.Shape:
    """Tiles that no border between two pieces of the row runs through, where they are even."""
    piece = t // 2 if ring.context.order == "zigzag" and t % 2 == 0 else t
    count = -(-piece // tiles.BLOCK)
    return tiles.Shape(-(-piece // count), skip=True)


def _cut(pair: _Pair, queries: Tokens, keys: Tokens) -> tuple[Tokens, Tokens]:
    return queries.part(pair.row, pair.size), keys.part(pair.column, pair.size)


def _take(start, size: int, *arrays) -> list:
    return [lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in arrays]


def _take_sums(sums, pair: _Pair):
    (out,), lse = _take(pair.row, pair.size, sums[0]), sums[1]
    return out, lax.dynamic_slice_in_dim(lse, pair.row, pair.size, axis=2)


def _put_sums(sums, start, part):
    out = lax.dynamic_update_slice_in_dim(sums[0], part[0], start, axis=1)
    return out, lax.dynamic_update_slice_in_dim(sums[1], part[1], start, axis=2)


def _accumulate(total, part, start, axis: int):
    before = lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, before + part, start, axis)


def _merge(sums, out, lse):
    """Two results of a softmax over different keys, as one: weighted by their log-sum-exps."""
    before, before_lse = sums
    top = jnp.maximum(before_lse, lse)
    top = jnp.where(top == -jnp.inf, 0, top)
    old, new = jnp.exp(before_lse - top), jnp.exp(lse - top)
    total = old + new
    share = lambda part: (part / jnp.where(total > 0, total, 1)).swapaxes(1, 2)[..., None]  # noqa: E731
    merged = before * share(old) + out.astype(jnp.float32) * share(new)
    return merged, jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
