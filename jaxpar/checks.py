"""What a state and a model must be before a step may take them."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp

from jaxpar.layout import Layout
from jaxpar.nn.context_attention import check_exchange, make_context


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


def with_ulysses(layout: Layout, config) -> Layout:
    """The layout with its number of devices that exchange heads, if it names none: as many as the
    heads of `config` allow, without copies of kv heads where that can be.

    Raises ValueError where a model's heads cannot be divided as the layout says.
    """
    if layout.context == 1 or config is None or layout.attention in ("ring", "allgather"):
        return layout
    heads = config.num_heads // layout.tensor
    kv_heads = max(config.num_kv_heads // layout.tensor, 1)
    if layout.attention == "ring+ulysses" and layout.ulysses == 0:
        sizes = [u for u in range(2, layout.context) if layout.context % u == 0]
        fits = [u for u in sizes if heads % u == 0 and (kv_heads % u == 0 or u % kv_heads == 0)]
        best = max(fits or sizes, key=lambda u: (kv_heads % u == 0, u))
        layout = dataclasses.replace(layout, ulysses=best)
    made = make_context(layout.context, layout.attention, layout.ulysses, layout.context_order)
    check_exchange(made, heads, kv_heads)
    return layout


def _path(keys) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".").removesuffix(".value")
