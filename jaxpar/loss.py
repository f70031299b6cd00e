"""Next-token cross entropy with the vocabulary split over devices.

Logits exist for one chunk of tokens at a time and for this device's share of the vocabulary
only; the backward pass computes them again from the saved log-sum-exp, with no communication.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.nn.parallel import (
    axis_index,
    axis_size,
    gather_sequence,
    sequence_first,
    settings,
    vary,
    vary_like,
    zeros_after,
)

CHUNK = 1024
"""Tokens whose logits exist at the same time."""


def cross_entropy(
    x: Float[Array, "B S D"],
    table: Float[Array, "V D"],
    batch: dict,
    vocab_size: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted sum of -log softmax(x . table^T)[target], and the sum of the weights.

    `table` is this device's share of the vocabulary; rows from `vocab_size` up are padding and
    take no part. Tokens of weight 0 contribute exactly 0 to the sum and to every gradient, even
    where x is infinite or NaN there.
    """
    weights = sequence_first(batch["weights"].astype(jnp.float32)).reshape(-1)
    losses = _counted_losses(x, table, batch, vocab_size, weights > 0)
    return jnp.sum(losses * weights), jnp.sum(weights)


def token_cross_entropy(
    x: Float[Array, "B S D"],
    table: Float[Array, "V D"],
    batch: dict,
    vocab_size: int,
) -> Float[Array, "B T"]:
    """-log softmax(x . table^T)[target] of each token, 0 where its weight is 0; not weighted."""
    weights = sequence_first(batch["weights"])
    losses = _counted_losses(x, table, batch, vocab_size, weights.reshape(-1) > 0)
    return sequence_first(losses.reshape(weights.shape))  # its own reverse


def _counted_losses(x, table, batch, vocab_size, counted):
    """fp32 losses of all tokens in the order of `sequence_first`, 0 where they do not count."""
    axes = settings(batch).vocab_axes
    x = vary(gather_sequence(x, batch), axes)  # x[b, s, D] -> x[b, t, D]
    x = jnp.where(counted[:, None], sequence_first(x).reshape(-1, x.shape[-1]), 0)
    targets = sequence_first(batch["targets"]).reshape(-1)
    losses = token_losses(x, vary(table, axes), targets, vocab_size, axes)
    return jnp.where(counted, losses, 0)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_losses(
    x: Float[Array, "n D"],
    table: Float[Array, "v D"],
    targets: Int[Array, "n"],
    vocab_size: int,
    axes: tuple[str, ...],
) -> Float[Array, "n"]:
    """-log softmax(x . table^T)[target] for every token, fp32.

    Sends three numbers per token over `axes`: the maximum, then the sum of exponentials and the
    target's logit (arXiv 1909.08053, section 3).
    """
    return _losses(x, table, targets, vocab_size, axes)[0]


def _losses(x, table, targets, vocab_size, axes):
    def one(chunk):
        xc, tc = chunk
        logits, column = _logits(xc, table, tc, vocab_size, axes)
        top = _over(lax.pmax, lax.stop_gradient(logits.max(axis=-1)), axes)
        at_target = jnp.take_along_axis(logits, jnp.maximum(column, 0)[:, None], axis=-1)[:, 0]
        parts = jnp.stack(
            [jnp.exp(logits - top[:, None]).sum(axis=-1), jnp.where(column >= 0, at_target, 0)]
        )
        sums, at_target = _over(lax.psum, parts, axes)
        lse = top + jnp.log(sums)
        return lse - at_target, lse

    losses, lse = _map_chunks(one, (x, targets))
    return losses, lse


def _forward(x, table, targets, vocab_size, axes):
    losses, lse = _losses(x, table, targets, vocab_size, axes)
    return losses, (x, table, targets, lse)


def _backward(vocab_size, axes, saved, gradient):
    x, table, targets, lse = saved

    def one(carry, chunk):
        d_table, xs = carry  # a chunk's gradient takes the place of its x in xs
        i, tc, lc, gc = chunk
        xc = lax.dynamic_index_in_dim(xs, i, keepdims=False)
        logits, column = _logits(xc, table, tc, vocab_size, axes)
        hit = column[:, None] == jnp.arange(table.shape[0])
        d = jnp.where(gc[:, None] != 0, (jnp.exp(logits - lc[:, None]) - hit) * gc[:, None], 0)
        d = d.astype(x.dtype)
        # d[n, v] . table[v, D] -> dx[n, D], partial over the vocabulary; summed where x varies
        d_table += jnp.einsum("nv,nd->vd", d, xc, preferred_element_type=jnp.float32)
        dx = jnp.einsum("nv,vd->nd", d, table)
        return (d_table, lax.dynamic_update_index_in_dim(xs, dx, i, axis=0)), None

    start = vary_like(zeros_after(x, table.shape, jnp.float32), table)
    xs = vary_like(_chunks(x), table)
    chunks = (jnp.arange(xs.shape[0]), _chunks(targets), _chunks(lse), _chunks(gradient))
    (d_table, dx), _ = lax.scan(one, (start, xs), chunks)
    dx = dx.reshape(-1, x.shape[-1])[: x.shape[0]]
    return dx, d_table.astype(table.dtype), None


token_losses.defvjp(_forward, _backward)


def _logits(x, table, targets, vocab_size, axes):
    """fp32 logits [n, v] of this device's rows of the table, and the target's column or -1."""
    logits = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=jnp.float32)
    first = axis_index(axes) * table.shape[0]
    columns = first + jnp.arange(table.shape[0])
    logits = jnp.where(columns < vocab_size, logits, -jnp.inf)
    column = targets - first
    return logits, jnp.where((column >= 0) & (column < table.shape[0]), column, -1)


def _over(reduce, x, axes):
    axes = tuple(a for a in axes if axis_size(a) > 1)
    return reduce(x, axes) if axes else x


def _map_chunks(function, arrays):
    """function on chunks of at most CHUNK tokens, results joined; padding tokens are dropped."""
    tokens = arrays[0].shape[0]
    if tokens <= CHUNK:
        return function(arrays)
    out = lax.map(function, tuple(_chunks(a) for a in arrays))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:tokens], out)


def _chunks(a: jax.Array) -> jax.Array:
    """a[n, ...] -> [chunks, size, ...] with size at most CHUNK, padded with zeros."""
    tokens = a.shape[0]
    count = -(-tokens // CHUNK)
    size = -(-tokens // count)
    a = jnp.pad(a, [(0, count * size - tokens)] + [(0, 0)] * (a.ndim - 1))
    return a.reshape(count, size, *a.shape[1:])
