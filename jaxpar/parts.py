"""A model taken apart: which leaves are layers, and how each leaf is split."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.layout import Layout
from jaxpar.splits import Split, split_param


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model taken apart: its leaves' splits, and how to put it together again.

    `is_layer[i]`: leaf i belongs to the stack of layers; the others are called outer.
    """

    splits: tuple[Split, ...]
    is_layer: tuple[bool, ...]
    tree: jax.tree_util.PyTreeDef
    layer_tree: jax.tree_util.PyTreeDef

    def outer(self, leaves: list) -> list:
        return [x for x, inside in zip(leaves, self.is_layer, strict=True) if not inside]

    def layers(self, leaves: list) -> list:
        return [x for x, inside in zip(leaves, self.is_layer, strict=True) if inside]

    def join(self, outer: list, layers: list) -> list:
        a, b = iter(outer), iter(layers)
        return [next(b) if inside else next(a) for inside in self.is_layer]

    def model(self, outer: list):
        """The model with its outer leaves; layers hold nothing, blocks get theirs by argument."""
        return self.tree.unflatten(self.join(outer, [None] * sum(self.is_layer)))


def take_apart(model, layout: Layout) -> Parts:
    """Reads the dims of every parameter of `model` and decides its split.

    Raises ValueError for a model without `layers`, `embed` and `block`, for a leaf that is no
    floating-point array, and for what `splits.split_param` refuses.
    """
    for name in ("layers", "embed", "block"):
        if not hasattr(model, name):
            raise ValueError(
                f"{type(model).__name__} has no `{name}`; a model needs `embed(batch)`, "
                "a stack `layers` and `block(layer, x, batch)`"
            )
    return read_parts(model, layout)


def read_parts(model, layout: Layout) -> Parts:
    """Takes any pytree with an entry `layers` apart; leaves without dims are split by ZeRO only."""
    is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
    flat, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_variable)
    splits, is_layer = [], []
    for keys, leaf in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        value = leaf.get_value() if is_variable(leaf) else leaf
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"{path} has type {value.dtype}; every leaf of a model is a parameter "
                "and must be a floating-point array"
            )
        inside = path.split(".")[0] == "layers"
        names = leaf.get_metadata().get("dims") if is_variable(leaf) else None
        names = names or (("layers",) if inside else ()) + (None,) * (value.ndim - inside)
        splits.append(split_param(path, value.shape, value.dtype, names, layout))
        is_layer.append(inside)
    layers = jax.tree.structure(layers_of(model))
    return Parts(tuple(splits), tuple(is_layer), jax.tree.structure(model), layers)


def layers_of(model):
    """The stack of layers, by key or by attribute; ValueError where there is none."""
    layers = model.get("layers") if isinstance(model, Mapping) else getattr(model, "layers", None)
    if layers is None or not jax.tree.leaves(layers):
        raise ValueError(
            f"the parameters ({type(model).__name__}) have no entry `layers`; put the weights of "
            "all blocks there, each with a leading dim of layers"
        )
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(layers)}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(
            f"the leaves of `layers` have leading sizes {sorted(lengths)}; all must have one "
            "leading dim, the number of layers"
        )
    return layers


def num_layers(model) -> int:
    """Length of the stack `layers`."""
    return jax.tree.leaves(layers_of(model))[0].shape[0]
