"""Attention of a split sequence: keys and values circulate, or are gathered, and come in blocks.

The one idea: every device keeps its queries and sees the keys of one device after the other, its
own first, while the next ones are on their way (arXiv 2310.01889). What a block adds is merged by
its log-sum-exp, in fp32. The backward pass goes around once more: it computes the scores again,
and the gradients of keys and values travel with them, home in the end. Nothing grows with the ring.
"""

import dataclasses
from functools import partial

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

    `kernel`: blockwise, or one of `flash` (cudnn, xla). `in_order`: each device's tokens lie in
    the order of their places.
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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def circulate(ring: Ring, q, k, v, queries: Tokens, keys: Tokens):
    """softmax(q . k / sqrt(H)) . v over the keys of all members.

    q[b, t, N, H], k and v[b, t, K, H] are this member's, of the places `queries`; `keys` [b, T]
    are those of all members, the first one's first. q, k and v must vary over the same mesh axes,
    those of the places among them.
    """
    return _forward(ring, q, k, v, queries, keys)[0]


def _forward(ring: Ring, q, k, v, queries, keys):
    add = partial(_add, ring, q, queries, keys)
    out = jnp.zeros_like(q, jnp.float32)
    sums = (out, out.sum(axis=-1).swapaxes(1, 2) - jnp.inf)
    kv = jnp.stack([k, v])
    if ring.context.gathers and ring.size > 1:
        # kv[2, b, t, K, H] of every member: all-gather, (n-1) x its bytes
        gathered = lax.all_gather(kv, ring.context.axis)
        sums = add(sums, kv, 0)
        sums, _ = lax.scan(
            lambda sums, back: (add(sums, gathered[ring.member(back)], back), None),
            sums,
            jnp.arange(1, ring.size),
        )
    else:
        sums = _forward_around(ring, kv, add, sums)
    out, lse = sums
    out = out.astype(q.dtype)
    return out, (q, k, v, queries, keys, out, lse)


def _forward_around(ring: Ring, kv, add, sums):
    """n-1 permutations of kv, each under way while the block before it is computed."""
    coming = ring.hop(kv) if ring.size > 1 else None
    sums = add(sums, kv, 0)

    def step(carry, back):
        kv, sums = carry
        coming = ring.hop(kv)
        return (coming, add(sums, kv, back)), None

    if ring.size > 2:
        (coming, sums), _ = lax.scan(step, (coming, sums), jnp.arange(1, ring.size - 1))
    return add(sums, coming, ring.size - 1) if ring.size > 1 else sums


def _backward(ring: Ring, saved, gradient):
    q, k, v, queries, keys, out, lse = saved
    delta = jnp.sum(out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    delta = delta.swapaxes(1, 2)
    add = partial(_add_back, ring, (q, out, lse, delta, gradient), queries, keys)
    kv = jnp.stack([k, v])
    dq = jnp.zeros_like(q, jnp.float32)
    if ring.context.gathers and ring.size > 1:
        dq, dkv = _backward_gathered(ring, kv, add, dq)
    else:
        dq, dkv = _backward_around(ring, ring.after(kv, delta), add, dq)
    dk, dv = dkv.astype(k.dtype)
    return dq.astype(q.dtype), dk, dv, None, None


circulate.defvjp(_forward, _backward)


def _backward_gathered(ring: Ring, kv, add, dq):
    """kv is gathered once more; its gradients are summed by a reduce-scatter."""
    gathered = lax.all_gather(kv, ring.context.axis)
    dq, own = add(dq, kv, 0)
    start = lax.dynamic_update_index_in_dim(
        jnp.zeros_like(gathered), own.astype(kv.dtype), ring.member(), axis=0
    )

    def step(carry, back):
        dq, dkv = carry
        member = ring.member(back)
        dq, part = add(dq, gathered[member], back)
        part = part.astype(kv.dtype)
        return (dq, lax.dynamic_update_index_in_dim(dkv, part, member, axis=0)), None

    (dq, dkv), _ = lax.scan(step, (dq, start), jnp.arange(1, ring.size))
    return dq, lax.psum_scatter(dkv, ring.context.axis, scatter_dimension=0)


def _backward_around(ring: Ring, kv, add, dq):
    """n-1 permutations of kv and as many of its gradients, which follow one block behind."""
    n, dtype = ring.size, kv.dtype
    coming = ring.hop(kv) if n > 1 else None
    dq, own = add(dq, kv, 0)
    if n == 1:
        return dq, own
    kv, coming = coming, ring.hop(coming) if n > 2 else None
    dq, sums = add(dq, kv, 1)
    sums = sums.astype(dtype)

    def step(carry, back, last=False):
        dq, sums, kv = carry
        arrived = ring.hop(sums)
        coming = None if last else ring.hop(ring.after(kv, arrived))
        dq, part = add(dq, kv, back)
        return (dq, (arrived + part).astype(dtype), coming), None

    if n > 2:
        carry = (dq, ring.after(sums, coming), coming)
        if n > 3:
            carry, _ = lax.scan(step, carry, jnp.arange(2, n - 1))
        (dq, sums, _), _ = step(carry, n - 1, last=True)
    return dq, own + ring.hop(sums)


# ---- one block


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Queries and keys of a block that may see each other: `size` from `row` and `column` on.

    `is_causal`: each query sees the keys up to its own number. `masked`: what is seen depends on
    the tokens, and may be nothing.
    """

    row: int | jax.Array
    column: int | jax.Array
    size: int
    is_causal: bool
    masked: bool


def _pairs(ring: Ring, t: int, back, queries: Tokens) -> list[_Pair]:
    """The parts of the block of the member `back` places before that a kernel has to compute.

    In zigzag order that is half of it, the same for every member: the later half of the queries
    sees the earlier half of the keys, and one half each sees another, depending on who is first.
    """
    masked = queries.segments is not None or ring.rule.window is not None
    if isinstance(back, int) and back == 0:
        ordered = ring.in_order and ring.rule.is_causal
        return [_Pair(0, 0, t, ordered, masked or not ordered and ring.rule.is_causal)]
    if ring.context.order == "zigzag" and ring.in_order and ring.rule.is_causal:
        half = t // 2
        other = jnp.where(ring.member(back) < ring.member(), 0, half)
        return [_Pair(half, 0, half, False, masked), _Pair(other, other, half, False, masked)]
    return [_Pair(0, 0, t, False, masked or ring.rule.is_causal)]


def _add(ring: Ring, q, queries: Tokens, keys: Tokens, sums, kv, back):
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


def _add_back(ring: Ring, saved, queries: Tokens, keys: Tokens, dq, kv, back):
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
