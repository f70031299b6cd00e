"""Which keys a query may see: the one definition of the mask, for every attention here.

A token is known by its place in the row and by its document, so a mask is made for any set of
queries against any set of keys, wherever the layout has put them; no array [T, T] is needed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens as a mask knows them.

    `places`: int32 [b, t] or [1, t], which token comes before which; places within each document
    do as well, where there are `segments`: int32 [b, t], the document of each token. A negative
    one is padding, which sees nothing and is not seen. None: one document a row.
    """

    places: Int[Array, "b t"]
    segments: Int[Array, "b t"] | None = None

    def part(self, start, size: int) -> "Tokens":
        """`size` tokens from number `start` on, which may be traced."""
        take = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis=1)  # noqa: E731
        return jax.tree.map(take, self)

    def padded(self, length: int) -> "Tokens":
        """With tokens of any kind after the end, `length` in all."""
        missing = length - self.places.shape[1]
        return jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, missing))), self) if missing else self


@dataclasses.dataclass(frozen=True)
class Rule:
    """What hides a key from a query, apart from documents: it comes later (`is_causal`), or it lies
    `window` places or more away (arXiv 2310.06825, section 2: a query sees `window` keys, its own
    among them)."""

    is_causal: bool = True
    window: int | None = None

    def __post_init__(self):
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(
                f"window={self.window} is no number of tokens from 1 up; use 1 (itself alone) or "
                "more, or None"
            )


def seen(rule: Rule, queries: Tokens, keys: Tokens) -> Bool[Array, "b t s"] | None:
    """True where a query may see a key; None where every query sees every key."""
    before, after = queries.places[:, :, None], keys.places[:, None, :]
    parts = []
    if rule.is_causal:
        parts.append(before >= after)
    if rule.window is not None:
        distance = before - after
        parts.append((distance < rule.window) & (distance > -rule.window))
    if queries.segments is not None:
        mine, other = queries.segments[:, :, None], keys.segments[:, None, :]
        parts.append((mine == other) & (mine >= 0))
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask
