"""Which token lies on which device where the sequence is split over the context axis.

The one idea: an order is a list of the row's tokens, the first device's first. Everything that
depends on a token's neighbours (labels, positions, documents) is computed on the whole row and then
taken in this order; what goes back to the user is put in the row's own order.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

ORDERS = ("zigzag", "contiguous", "document")
"""zigzag: device i of a ring of n holds pieces i and 2n-1-i of the row's 2n, so that with a causal
mask all have the same work; contiguous: piece i of n; document: zigzag in each document."""

VARIANTS = ("ring", "ulysses", "allgather", "ring+ulysses")
"""Keys and values circulate (arXiv 2310.01889); heads are exchanged for the sequence (arXiv
2309.14509); keys and values are gathered (arXiv 2407.21783, section 3.3.2); both of the first."""


@dataclasses.dataclass(frozen=True)
class Context:
    """How attention runs over the context axis: `ring` x `ulysses` devices, ulysses innermost.

    `gathers`: keys and values of the whole ring are gathered at once, else they circulate.
    `one_at_a_time`: permutations wait for one another, as emulated devices need it.
    """

    ring: int = 1
    ulysses: int = 1
    gathers: bool = False
    order: str = "zigzag"
    axis: str = "context"
    one_at_a_time: bool = False

    @property
    def size(self) -> int:
        """Devices of the axis."""
        return self.ring * self.ulysses

    @property
    def multiple(self) -> int:
        """What the sequence must be a multiple of, for every device to hold the same."""
        return np.lcm(self.size, 2 * self.ring if self.order == "zigzag" else 1).item()


def places(length: int, context: Context) -> Int[np.ndarray, "C t"]:
    """Place in the row of each token, by device, where every row is one document.

    Raises ValueError for a length that does not divide.

    >>> places(8, Context(ring=2)).tolist()
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if length % context.multiple:
        low = length // context.multiple * context.multiple
        near = f"{low} or {low + context.multiple}" if low else str(context.multiple)
        raise ValueError(
            f"a sequence of {length} is not a multiple of {context.multiple}, which "
            f"{context.axis}={context.size} in {context.order} order needs; use {near}"
        )
    tokens = np.arange(length, dtype=np.int32)
    if context.order != "contiguous":  # of a row that is one document
        tokens = tokens[np.argsort(_member(tokens, length, context.ring), kind="stable")]
    return tokens.reshape(context.size, -1)


def _member(token, length, ring: int):
    """The member of the ring that holds a token of a document: the one of its piece of 2n."""
    piece = token * (2 * ring) // length
    return (np if isinstance(token, np.ndarray) else jnp).minimum(piece, 2 * ring - 1 - piece)


def document_places(segments: Int[Array, "b T"], context: Context) -> Int[Array, "b T"]:
    """The places of each row's tokens, the first device's first, zigzag in each document.

    Device i of a ring of n gets pieces i and 2n-1-i of every document's 2n; where a document does
    not divide, its pieces differ by a token, and what one device has too much the next one takes.

    >>> document_places(jnp.array([[0, 0, 0, 0, 1, 1, 1, 1]]), Context(ring=2)).tolist()
    [[0, 3, 4, 7, 1, 2, 5, 6]]
    """
    length = segments.shape[1]
    tokens = jnp.arange(length, dtype=jnp.int32)
    starts = jnp.concatenate(
        [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
    )
    first = jax.lax.cummax(jnp.where(starts, tokens, 0), axis=1)
    ends = jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], axis=1)
    last = jax.lax.cummin(jnp.where(ends, tokens, length), axis=1, reverse=True)
    member = _member(tokens - first, last - first + 1, context.ring)
    return jnp.argsort(member, axis=1, stable=True).astype(jnp.int32)


def inverse(order: Int[np.ndarray, "T"]) -> Int[np.ndarray, "T"]:
    """Takes an array in `order` back into the row's own: x[:, order][:, inverse(order)] is x."""
    return np.argsort(order)
