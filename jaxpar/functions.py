"""What a model does, as functions; and what a loss function may return."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jaxpar import _jax_compat


@dataclasses.dataclass(frozen=True)
class Functions:
    """What a model does, as functions of the model with its outer parameters.

    `embed(model, batch) -> x`, `block(model, layer, x, batch) -> x`, `loss(model, x, batch) ->
    (sum, count)`, `prepare(model, batch) -> batch`.
    """

    embed: Callable
    block: Callable
    loss: Callable
    prepare: Callable


def methods(model, loss: Callable) -> Functions:
    """The functions of a model with methods `embed`, `block` and perhaps `prepare`."""
    prepare = (lambda m, batch: m.prepare(batch)) if hasattr(model, "prepare") else _as_it_is
    return Functions(
        lambda m, batch: m.embed(batch),
        lambda m, layer, x, batch: m.block(layer, x, batch),
        loss,
        prepare,
    )


def _as_it_is(model, batch: dict) -> dict:
    return batch


def checked_outputs(function: Callable, dims: tuple[str, ...]) -> Callable:
    """`function`, whose result must be one array [b, t, ...] with as many dims as `dims` names.

    Raises ValueError with what was found, when it is traced.
    """

    def run(model, x, batch):
        result = function(model, x, batch)
        shape, want = getattr(result, "shape", None), batch["tokens"].shape
        if shape is None or len(shape) != len(dims) or shape[:2] != want:
            found = f"shape {shape}" if shape is not None else type(result).__name__
            raise ValueError(
                f"the function must return one array of dims {', '.join(dims)}, on this device "
                f"{want[0]} rows of {want[1]} tokens, and returned {found}; x between blocks may "
                "hold a share of the tokens, jaxpar.nn.gather_sequence(x, batch) joins them"
            )
        return result

    return run


def checked_loss(result):
    """(sum, count) of a loss function's result, fp32; ValueError where it can not be added up."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            "the loss must return (sum, count): the sum over its tokens and how many it counted; "
            f"found {type(result).__name__}. Return (sum, None) for a plain sum"
        )
    loss_sum, count = result
    count = jnp.float32(1) if count is None else jnp.asarray(count, jnp.float32)
    shared = _jax_compat.varying_axes(loss_sum) - _jax_compat.varying_axes(count)
    if "tensor" in shared and result[1] is not None:
        raise ValueError(
            "the loss sum was computed as a whole by every tensor device, but its count only once, "
            "so adding up would count it several times; use jaxpar.loss.cross_entropy, or take "
            "tokens and weights of this device's share (jaxpar.nn.local_sequence)"
        )
    return loss_sum.astype(jnp.float32), count
