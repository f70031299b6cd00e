"""Next-token cross entropy with the vocabulary split over devices.

Logits exist for one chunk of tokens at a time and for this device's share of the vocabulary
only; the backward pass computes them again from the saved log-sum-exp, with no communication.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.nn.parallel import axis_index, axis_size, gather_sequence, settings, vary, vary_like

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
    axes = settings(batch).vocab_axes
    x = vary(gather_sequence(x, batch), axes)  # x[b, s, D] -> x[b, t, D]
    weights = batch["weights"].astype(jnp.float32).reshape(-1)
    counted = weights > 0
    x = jnp.where(counted[:, None], x.reshape(-1, x.shape[-1]), 0)
    losses = token_losses(x, vary(table, axes), batch["targets"].reshape(-1), vocab_size, axes)
    return jnp.sum(jnp.where(counted, losses, 0) * weights), jnp.sum(weights)


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

    def one(d_table, chunk):
        xc, tc, lc, gc = chunk
        logits, column = _logits(xc, table, tc, vocab_size, axes)
        hit = column[:, None] == jnp.arange(table.shape[0])
        d = jnp.where(gc[:, None] != 0, (jnp.exp(logits - lc[:, None]) - hit) * gc[:, None], 0)
        d = d.astype(x.dtype)
        # d[n, v] . table[v, D] -> dx[n, D], partial over the vocabulary; summed where x varies
        d_table += jnp.einsum("nv,nd->vd", d, xc, preferred_element_type=jnp.float32)
        return d_table, jnp.einsum("nv,vd->nd", d, table)

    start = vary_like(vary_like(jnp.zeros(table.shape, jnp.float32), table), x)
    d_table, dx = _scan_chunks(one, start, (x, targets, lse, gradient))
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
    return _scan_chunks(lambda _, chunk: (None, function(chunk)), None, arrays)[1]


def _scan_chunks(function, carry, arrays):
    tokens = arrays[0].shape[0]
    count = -(-tokens // CHUNK)
    if count == 1:
        return function(carry, arrays)
    size = -(-tokens // count)

    def cut(a):
        a = jnp.pad(a, [(0, count * size - tokens)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(count, size, *a.shape[1:])

    carry, out = lax.scan(function, carry, jax.tree.map(cut, arrays))
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:tokens], out)
