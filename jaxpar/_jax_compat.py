"""What differs between JAX versions, or is not public there, in one place."""

import jax


def varying_axes(x) -> frozenset[str]:
    """The manual mesh axes over which `x` differs between devices (inside `shard_map`)."""
    return (x if hasattr(x, "mat") else jax.typeof(x)).mat.varying


def backend_started() -> bool:
    """Whether JAX has already started a backend, after which device flags are ignored."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def dead_inputs(closed_jaxpr, which_outputs: list[bool]) -> list[bool]:
    """For each input of `closed_jaxpr`: True where none of the marked outputs depends on it."""
    from jax.interpreters import partial_eval

    _, used = partial_eval.dce_jaxpr(closed_jaxpr.jaxpr, which_outputs)
    return [not u for u in used]


def xla_metadata(**attributes: str):
    """A context that puts frontend attributes on the operations made in it, for XLA to read."""
    from jax.experimental.xla_metadata import set_xla_metadata

    return set_xla_metadata(**attributes)
