"""Attention of a split sequence: keys and values circulate, or are gathered, and come in blocks.

The one idea: every device keeps its queries and sees the keys of one device after the other, its
own first, while the next ones are on their way (arXiv 2310.01889). What a block adds is merged by
its log-sum-exp, in fp32. The backward pass goes around once more: it computes the scores again,
and the gradients of keys and values travel with them, home in the end. Nothing grows with the ring.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.nn.blocks import Ring, add_block, add_block_back
from jaxpar.nn.parallel import zero_after
from jaxpar.nn.sight import Tokens


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def circulate(ring: Ring, q, k, v, queries: Tokens, keys: Tokens):
    """softmax(q . k / sqrt(H)) . v over the keys of all members.

    q[b, t, N, H], k and v[b, t, K, H] are this member's, of the places `queries`; `keys` [b, T]
    are those of all members, the first one's first. q, k and v must vary over the same mesh axes,
    those of the places among them.
    """
    return _forward(ring, q, k, v, queries, keys)[0]


def _forward(ring: Ring, q, k, v, queries, keys):
    add = partial(add_block, ring, q, queries, keys)
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
    add = partial(add_block_back, ring, (q, out, lse, delta, gradient), queries, keys)
    kv = jnp.stack([k, v])
    dq = jnp.zeros_like(q, jnp.float32)
    if ring.context.gathers and ring.size > 1:
        dq, dkv = _backward_gathered(ring, kv, add, dq)
    else:
        dq, dkv = _backward_around(ring, _after(kv, delta), add, dq)
    dk, dv = dkv.astype(k.dtype)
    return dq.astype(q.dtype), dk, dv, None, None


circulate.defvjp(_forward, _backward)


def _backward_gathered(ring: Ring, kv, add, dq):
    """kv is gathered once more; its gradients are summed by a reduce-scatter."""
    # kv[2, b, t, K, H] of every member: all-gather, (n-1) x its bytes
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
    # of every member's part: reduce-scatter, (n-1) x kv's bytes
    return dq, lax.psum_scatter(dkv, ring.context.axis, scatter_dimension=0)


def _backward_around(ring: Ring, kv, add, dq):
    """n-1 permutations of kv and as many of its gradients, which follow one block behind."""
    n, dtype = ring.size, kv.dtype
    coming = ring.hop(kv) if n > 1 else None
    dq, own = add(dq, kv, 0)
    if n == 1:
        return dq, own
    kv, coming = coming, ring.hop(_after(coming, own)) if n > 2 else None
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


def _after(x, other):
    """x, which exists only once `other` does.

    So keys and values go around behind the forward pass, whose first permutation XLA would else
    take for this one, and one step at a time, each behind a block.
    """
    return x + zero_after(other).astype(x.dtype)
