"""What a state must be before a step may take it."""

import warnings

import jax
import jax.numpy as jnp


def check_distinct(state) -> None:
    """Refuses a state that holds one array twice, or under two names.

    Each leaf is stored and updated on its own, so tied weights would train apart; and a step that
    donates one buffer twice fails. Raises ValueError with the paths of both.
    """
    owner: dict[int, str] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        path = _path(keys)
        if isinstance(leaf, jax.Array) and owner.setdefault(id(leaf), path) != path:
            raise ValueError(
                f"{owner[id(leaf)]} and {path} are the very same array, but each array of a state "
                "is stored, updated and donated once; to tie them keep one and use it twice, as "
                "tie_embeddings=True does, else copy one with jnp.copy"
            )


def warn_of_low_precision(model) -> None:
    """Warns of a parameter whose type rounds small updates away; names the first.

    >>> warn_of_low_precision({"w": jnp.zeros(3)})
    """
    for keys, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        if jnp.finfo(leaf.dtype).bits < 32:
            warnings.warn(
                f"{_path(keys)} is stored as {leaf.dtype}, without a float32 master copy, so "
                "small updates are rounded away; store parameters as float32 (precision='bf16' "
                "computes with them as bfloat16)",
                stacklevel=3,
            )
            return


def _path(keys) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".").removesuffix(".value")
