"""Layout + model -> Plan: where every array lives, and the functions that run it.

`make_plan` traces the user's `init` and allocates nothing. The plan's functions are pure and
take and return global arrays, so any optax transformation around them is right without knowing
about the mesh.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.batch import check_batch
from jaxpar.checks import check_distinct, warn_of_low_precision, with_ulysses
from jaxpar.functions import Functions, checked_outputs, methods
from jaxpar.layout import Layout
from jaxpar.mesh import make_mesh
from jaxpar.nn.attention import choose_kernel
from jaxpar.parts import Parts, num_layers, take_apart
from jaxpar.placement import Placement, pipeline_table, place_layers
from jaxpar.region import Region, batch_spec
from jaxpar.splits import Split, split_state


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a model's state lives under a layout, and the functions that train it.

    `shardings` has the structure of the state that `init` returns. `attention_kernel` is that of
    `nn.parallel.Settings`. `print(plan)` shows every array's split and bytes per device, and what
    each axis sends in a step.
    """

    layout: Layout
    mesh: Mesh
    state: Any
    shardings: Any
    splits: tuple[Split, ...]
    placement: Placement
    _init: Callable = dataclasses.field(repr=False)
    attention_kernel: str = "xla"
    _asked_kernel: str | None = dataclasses.field(default=None, repr=False)

    def init(self, key: jax.Array):
        """Makes the state, each device its own pieces; equal numbers under every layout."""
        init = lambda key: self.placement.store(self._init(key))  # noqa: E731
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else {}  # run once: compile fast
        return jax.jit(init, out_shardings=self.shardings, compiler_options=options)(key)

    @property
    def canonical_shardings(self):
        """How `canonical` lays the state out: as on the mesh, layers split where they divide."""
        if not self.placement.moves:
            return self.shardings
        even = self.placement.num_layers % self.layout.pipe == 0

        def change(keys, leaf, sharding):
            if even or not self.placement.is_stacked(keys, leaf):
                return sharding
            return NamedSharding(self.mesh, PartitionSpec(None, *sharding.spec[1:]))

        return jax.tree_util.tree_map_with_path(change, self.state, self.shardings)

    def canonical(self, state):
        """The state in the model's own order of layers, without padding; as it goes to disk."""
        if not self.placement.moves:
            return state
        restore = lambda s: self.placement.restore(s, self.state)  # noqa: E731
        return jax.jit(restore, out_shardings=self.canonical_shardings)(state)

    def stored(self, canonical):
        """The reverse of `canonical`: the state as it lives on the mesh.

        Raises ValueError for two leaves that are the very same array.
        """
        check_distinct(canonical)
        if not self.placement.moves:
            return canonical
        return jax.jit(self.placement.store, out_shardings=self.shardings)(canonical)

    @property
    def batch_sharding(self) -> NamedSharding:
        """How a batch's arrays [B, T] are laid out."""
        return NamedSharding(self.mesh, batch_spec(self.layout))

    def value_and_grad(self, loss: Callable) -> Callable:
        """Like `jax.value_and_grad`, in parallel: (model, batch, key=None) -> (loss, gradients).

        `loss(model, x, batch) -> (sum, count)` sees one device's rows of one microbatch; the
        result is the sum over everything divided by the global count, 0 where that is 0. With
        `count` None the loss is the plain sum. `key`, one per step, switches dropout on. Raises
        ValueError for a batch that does not fit the layout.
        """

        def function(model, batch, key=None):
            value, _, gradients = self._gradients(loss, model, batch, key)
            return value, gradients

        return function

    def loss(self, loss: Callable) -> Callable:
        """(model, batch) -> (sum, count) of a loss over the global batch, without dropout."""

        def function(model, batch):
            check_batch(self.layout, batch)
            parts = take_apart(model, self.layout)
            return self._region(methods(model, loss), parts).value(
                jax.tree.leaves(model), dict(batch)
            )

        return function

    def outputs(self, function: Callable, dims: Sequence[str] = ("batch", "seq")) -> Callable:
        """(model, batch) -> function(model, x, batch) of every token, as one global array.

        `function` gets the last block's output x and one device's part of a microbatch, and returns
        an array whose dims are called `dims`, "batch" and "seq" first: `model.token_losses`, or
        `model.logits` with dims ("batch", "seq", "vocab"). However the layout orders tokens, the
        result is in the rows' own order, without padding. No dropout.
        """
        dims = tuple(dims)
        if dims[:2] != ("batch", "seq"):
            raise ValueError(
                f"dims={dims} must begin with 'batch', 'seq': one result for each token"
            )

        def run(model, batch):
            check_batch(self.layout, batch)
            parts = take_apart(model, self.layout)
            found = self._region(methods(model, checked_outputs(function, dims)), parts).outputs(
                jax.tree.leaves(model), dict(batch), dims
            )
            sizes = {d: n for s in parts.splits for d, n in zip(s.dims, s.shape, strict=True)}
            cut = [slice(sizes.get(d)) if d == "vocab" else slice(None) for d in dims]
            return found[tuple(cut)]

        return run

    def train_step(
        self,
        tx: optax.GradientTransformation,
        loss: Callable | None = None,
        *,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> Callable:
        """A jitted step (state, batch, key=None) -> (state, metrics), the state donated.

        `state` is (model, optimizer state). `loss` is the model's own where None. Metrics: loss,
        tokens (the global count), grad_norm (before clipping), grad_norm_clipped (after), skipped.
        `clip_norm` clips by the global norm before `tx`. With `skip_nonfinite` a step whose loss
        or gradient norm is not finite leaves the state as it was, on every device.
        """

        warn_of_low_precision(find_model(self.state))

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=(self.shardings, None))
        def step(state, batch, key=None):
            model, opt_state = state
            value, count, gradients = self._gradients(loss or _own_loss, model, batch, key)
            norm = optax.tree.norm(gradients)
            clipped = norm
            if clip_norm is not None:
                gradients, _ = optax.clip_by_global_norm(clip_norm).update(gradients, ())
                clipped = optax.tree.norm(gradients)
            updates, new_opt_state = tx.update(gradients, opt_state, model)
            new_state = (optax.apply_updates(model, updates), new_opt_state)
            bad = ~(jnp.isfinite(value) & jnp.isfinite(norm))
            if skip_nonfinite:
                new_state = jax.tree.map(lambda a, b: jnp.where(bad, a, b), state, new_state)
            metrics = {
                "loss": value,
                "tokens": count,
                "grad_norm": norm,
                "grad_norm_clipped": clipped,
                "skipped": bad & skip_nonfinite,
                "nonfinite": bad,
            }
            return new_state, metrics

        return step

    def _gradients(self, loss, model, batch, key):
        check_batch(self.layout, batch)
        leaves, tree = jax.tree.flatten(model)
        parts = take_apart(model, self.layout)
        value, count, gradients = self._region(methods(model, loss), parts).value_and_grad(
            leaves, dict(batch), key
        )
        return value, count, tree.unflatten(gradients)

    def _region(self, functions: Functions, parts: Parts) -> Region:
        where = (self.layout, self.mesh, parts, functions, self.placement)
        return Region(*where, self.attention_kernel)

    def __str__(self) -> str:
        from jaxpar.report import plan_text

        return plan_text(self)


def _own_loss(model, x, batch):
    return model.loss(x, batch)


def make_plan(
    layout: Layout,
    init: Callable,
    *,
    devices: Sequence | None = None,
    mesh: Mesh | None = None,
    attention_kernel: str | None = None,
) -> Plan:
    """Plans the state that `init(key)` returns: any pytree that holds one model.

    `attention_kernel`: xla, cudnn or blockwise; None: cuDNN's for bf16 on GPUs, else XLA's. Raises
    ValueError where the layout does not fit the devices or the model, before anything compiles.
    """
    mesh = make_mesh(layout, devices) if mesh is None else mesh
    layout = layout.fill(mesh.size)
    check_supported(layout)
    platform = mesh.devices.flat[0].platform
    kernel = choose_kernel(attention_kernel, platform, layout.precision, layout.context)
    state = jax.eval_shape(_checked(init), jax.random.key(0))
    layout = with_ulysses(layout, getattr(find_model(state), "config", None))
    placement = place_layers(layout, num_layers(find_model(state)))
    stored = jax.eval_shape(placement.store, state)
    parts = take_apart(find_model(stored), layout)
    splits = split_state(stored, parts.splits, layout)
    tree = jax.tree.structure(state)
    shardings = tree.unflatten([NamedSharding(mesh, s.spec) for s in splits])
    pipeline_table(layout)
    return Plan(
        layout, mesh, state, shardings, tuple(splits), placement, init, kernel, attention_kernel
    )


def _checked(init: Callable) -> Callable:
    """`init`, refusing a model that holds one array under two names; seen while it is traced."""

    def traced(key):
        state = init(key)
        check_distinct(find_model(state))
        return state

    return traced


def check_supported(layout: Layout) -> None:
    """Refuses the settings that this version does not run yet."""
    if layout.expert > 1:
        raise ValueError(
            f"expert={layout.expert} does not run in this version; use pipe, replica, data, "
            "context and tensor"
        )
    if layout.remat == "stage" and layout.pipe == 1:
        raise ValueError("remat='stage' needs pipe > 1; use remat='block'")
    if layout.chunks > 1 and layout.pipe == 1:
        raise ValueError(f"chunks={layout.chunks} needs pipe > 1; use chunks=1")


def find_model(state):
    """The module of `state` nearest to the top that has layers; optimizers hold copies like it."""
    is_module = lambda v: isinstance(v, nnx.Module) and hasattr(v, "layers")  # noqa: E731
    flat, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_module)
    models = [(len(path), i) for i, (path, leaf) in enumerate(flat) if is_module(leaf)]
    if not models:
        raise ValueError(
            "init(key) returned no model with `layers`; return it alone or in a tuple "
            "with the optimizer state"
        )
    return flat[min(models)[1]][1]
