"""The manual region: loss and gradients of a model under a layout, in one `shard_map`.

Every device takes its rows through the model microbatch by microbatch, forward and backward
written out. Gradients are each device's own until `splits.give_back` reduces them, once a step
(ZeRO 0 and 1), once a microbatch (ZeRO 2) or once a block (ZeRO 3). With ZeRO 0 on one stage the
last microbatch reduces each layer's sum while it goes back through the layers before.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar import _jax_compat
from jaxpar import dims as dim_rules
from jaxpar.batch import own_tokens
from jaxpar.functions import Functions, checked_loss
from jaxpar.layout import AXES, BATCH_AXES, Layout
from jaxpar.nn.context_attention import make_context
from jaxpar.nn.order import Context
from jaxpar.nn.parallel import Settings, axis_index, total, vary
from jaxpar.parts import Parts
from jaxpar.pipeline import evaluation, executor, one_stage, stage
from jaxpar.placement import Placement, pipeline_table
from jaxpar.splits import fetch, give_back, used_shape

COMPUTE = {"bf16": jnp.bfloat16, "fp32": jnp.float32}


def batch_spec(layout: Layout) -> PartitionSpec:
    """Rows over (replica, data, expert), sequence over context."""
    rows, seq = layout.present(BATCH_AXES) or None, layout.present(("context",))
    return PartitionSpec(rows, seq[0]) if seq else PartitionSpec(rows)


def reduces_last(layout: Layout) -> bool:
    """Whether the last microbatch gives back each layer's sum as soon as it is complete.

    So with ZeRO 0 on one stage. With ZeRO 1 XLA, which takes the last block out of the loop to hide
    the reductions, would keep the gathered weights a second time, as they were gathered for it
    and as the loop wants them: 2.3 of 13.1 GiB for llama:1b.
    """
    return layout.pipe == 1 and layout.zero == 0 and layout.size(BATCH_AXES + ("context",)) > 1


@dataclasses.dataclass(frozen=True)
class Region:
    """The functions of one kind of model, ready to run inside `shard_map`."""

    layout: Layout
    mesh: Mesh
    parts: Parts
    functions: Functions
    placement: Placement
    attention_kernel: str = "xla"

    # ---- outside the manual region: global arrays in, global arrays out

    def value_and_grad(self, leaves: list, batch: dict, key=None):
        """(loss, count, gradients of all leaves); everything a global array."""
        specs = [s.spec for s in self.parts.splits]
        out = (PartitionSpec(), PartitionSpec(), specs)
        return self._run(self._gradients, out, leaves, batch, key)

    def value(self, leaves: list, batch: dict):
        """(sum, count) of the loss over the global batch; no dropout, nothing kept."""
        return self._run(self._loss_sum, (PartitionSpec(), PartitionSpec()), leaves, batch, None)

    def outputs(self, leaves: list, batch: dict, dims: tuple[str, ...]):
        """What `functions.loss` gives for each token, as one global array of the named dims, in
        the rows' own order."""
        # in contiguous order every device's tokens are where they belong
        region = dataclasses.replace(
            self, layout=dataclasses.replace(self.layout, context_order="contiguous")
        )
        axes = [self.layout.present(dim_axes) for dim_axes in map(dim_rules.axes_of, dims)]
        spec = PartitionSpec(*(a or None for a in axes))
        return region._run(region._outputs, spec, leaves, batch, None)

    def _run(self, function, out_specs, leaves, batch, key):
        specs = [s.spec for s in self.parts.splits]
        batch_specs = {name: batch_spec(self.layout) for name in batch}
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            check_vma=True,
            out_specs=out_specs,
            in_specs=(specs, batch_specs, PartitionSpec()),
        )
        return mapped(leaves, batch, key)

    # ---- inside: this device's pieces

    def _gradients(self, stored: list, batch: dict, key):
        zero, parts = self.layout.zero, self.parts
        outer, layers = self._once(stored)
        batch = own_tokens(batch, self._context)
        microbatches = self._microbatches(batch)
        count, scale = self._count(batch)
        sums = [
            stage.zeros_for(self._used(parts.outer, outer, zero >= 2)),
            stage.zeros_for(self._used(parts.layers, layers, zero >= 2)),
        ]
        run = executor.run if self.layout.pipe > 1 else one_stage.run
        loss_sum, *sums = run(self._program(key), outer, layers, microbatches, *sums, scale)
        gradients = parts.join(*sums)
        if zero < 2:
            early = reduces_last(self.layout)
            gradients = [
                g if early and inside else give_back(g, s, self.layout)
                for g, s, inside in zip(gradients, parts.splits, parts.is_layer, strict=True)
            ]
        return total(loss_sum) * scale, count, gradients

    def _loss_sum(self, stored: list, batch: dict, key):
        outer, layers = self._once(stored)
        microbatches = self._microbatches(own_tokens(batch, self._context))
        run = evaluation.evaluate if self.layout.pipe > 1 else one_stage.evaluate
        sums = run(self._program(None, train=False), outer, layers, microbatches)
        return tuple(total(s) for s in sums)

    def _outputs(self, stored: list, batch: dict, key):
        outer, layers = self._once(stored)
        microbatches = self._microbatches(own_tokens(batch, self._context))
        run = evaluation.collect if self.layout.pipe > 1 else one_stage.collect
        program = dataclasses.replace(
            self._program(None, train=False),
            loss=lambda outer, x, batch: self.functions.loss(self.parts.model(outer), x, batch),
        )
        found = run(program, outer, layers, microbatches)
        return found.reshape(-1, *found.shape[2:])

    def _sum_and_count(self, outer, x, batch):
        return checked_loss(self.functions.loss(self.parts.model(outer), x, batch))

    def _program(self, key, train: bool = True) -> executor.Program:
        """The model and its schedule, as the executors take them."""
        splits = self.parts.outer(self.parts.splits)

        def give_back_outer(gradients):
            if self.layout.zero < 2:
                return gradients
            pairs = zip(gradients, splits, strict=True)
            return [None if g is None else give_back(g, s, self.layout) for g, s in pairs]

        stack = self._stack()
        return executor.Program(
            table=pipeline_table(self.layout, train) if self.layout.pipe > 1 else None,
            counts=self.placement.counts,
            stack=stack if train else dataclasses.replace(stack, remat="nothing"),
            prepare=lambda rows: self._prepare(rows, key),
            embed=self._embed,
            loss=self._sum_and_count,
            fetch_outer=self._outer,
            give_back_outer=give_back_outer,
            finish=self._give_back_layer if reduces_last(self.layout) else None,
            fetch_ahead=self.layout.zero == 3 and self.layout.pipe == 1,
            idle=self._idle,
            one_at_a_time=self._on_cpu,
        )

    @property
    def _idle(self) -> str:
        if self.layout.circulates:
            return "everywhere"
        return "compute" if self.layout.computes_idle else "skip"

    @property
    def _on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    def _once(self, stored: list):
        """Outer and layer leaves, fetched where the layout fetches once a step."""
        if self.layout.zero < 3:
            stored = self._fetch(stored, self.parts.splits)
        return self.parts.outer(stored), self.parts.layers(stored)

    def _fetch(self, stored: list, splits: list) -> list:
        """Stored pieces in the compute type, as layers use them."""
        compute = COMPUTE[self.layout.precision]
        return [fetch(x.astype(compute), s) for x, s in zip(stored, splits, strict=True)]

    def _outer(self, outer: list, after) -> list:
        """The outer weights; with ZeRO 3 fetched here, once `after` is computed, and not kept."""
        if self.layout.zero < 3:
            return outer
        outer = [lax.optimization_barrier((x, after))[0] for x in outer]
        return self._fetch(outer, self.parts.outer(self.parts.splits))

    def _used(self, part, arrays: list, stored: bool) -> list:
        """Arrays with the shape and type that gradient sums have."""
        if not stored or self.layout.zero == 3:
            return arrays
        splits = part(self.parts.splits)
        return [give_back(a, s, self.layout) for a, s in zip(arrays, splits, strict=True)]

    def _stack(self) -> stage.Stack:
        splits, tree = self.parts.layers(self.parts.splits), self.parts.layer_tree
        give_back = self._give_back_layer if self.layout.zero >= 2 else lambda gradients: gradients
        model = self.parts.model([None] * len(self.parts.outer(self.parts.splits)))

        def fetch_layer(stored):
            if self.layout.zero < 3:
                return stored
            return self._fetch(stored, splits)

        def block(weights, x, batch):
            return self.functions.block(model, tree.unflatten(weights), x, batch)

        return stage.Stack(block, fetch_layer, give_back, self.layout.remat)

    def _give_back_layer(self, gradients: list) -> list:
        splits = self.parts.layers(self.parts.splits)
        return [give_back(g, s, self.layout) for g, s in zip(gradients, splits, strict=True)]

    def _embed(self, outer: list, batch: dict):
        x = self.functions.embed(self.parts.model(outer), batch)
        return vary(x, self._activation_axes)

    @property
    def _activation_axes(self) -> tuple[str, ...]:
        """Axes over which devices hold different activations."""
        sequence = ("tensor",) if self._settings.sequence_parallel else ()
        return ("pipe", *BATCH_AXES, "context", *sequence)

    @property
    def _settings(self) -> Settings:
        return Settings(
            sequence_parallel=self.layout.sequence_parallel and self.layout.tensor > 1,
            vocab_axes=self.layout.present(dim_rules.RULES["vocab"]),
            attention_kernel=self.attention_kernel,
            context=self._context,
        )

    @property
    def _context(self) -> Context:
        """How attention runs over the context axis."""
        c = self.layout
        settings = (c.context, c.attention, c.ulysses, c.context_order)
        return make_context(*settings, one_at_a_time=self._on_cpu) if c.context > 1 else Context()

    def _microbatches(self, batch: dict) -> dict:
        """batch[b, t] -> [m, b / m, t], with each row's number in the global batch."""
        rows = next(iter(batch.values())).shape[0]
        first = axis_index(self.layout.present(BATCH_AXES)) * rows
        batch = {**batch, "rows": first + jnp.arange(rows, dtype=jnp.int32)}
        m = self.layout.microbatches
        return jax.tree.map(lambda a: a.reshape(m, a.shape[0] // m, *a.shape[1:]), batch)

    def _prepare(self, rows: dict, key) -> dict:
        """A microbatch as the model sees it."""
        batch = {**rows, "settings": self._settings}
        if "positions" not in batch and "tokens" in batch:
            length = batch["tokens"].shape[1]
            batch["positions"] = jnp.broadcast_to(
                jnp.arange(length, dtype=jnp.int32), batch["tokens"].shape
            )
        if key is not None:
            batch["dropout_key"] = key
        model = self.parts.model([None] * len(self.parts.outer(self.parts.splits)))
        batch = self.functions.prepare(model, batch)
        if "rope" in batch:  # typed as what it turns, it is the same array for all layers
            everywhere = self.layout.present(AXES)
            batch["rope"] = jax.tree.map(lambda a: vary(a, everywhere), batch["rope"])
        return batch

    def _count(self, batch: dict):
        """The global count and 1 / count, before anything runs. 1 / 0 becomes 0.

        Raises ValueError where the loss's count depends on the model, since it must be known
        before the backward pass.
        """
        rows = next(iter(batch.values())).shape[0]
        batch = self._prepare({**batch, "rows": jnp.arange(rows)}, None)
        weights = [jnp.zeros(s.shape, s.dtype) for s in self._outer_shapes()]
        x = jax.eval_shape(lambda w: self._embed(w, batch), weights)

        def count(weights, x):
            return self._sum_and_count(weights, x, batch)[1]

        x = vary(jnp.zeros(x.shape, x.dtype), [a for a in self._activation_axes if a != "pipe"])
        jaxpr = jax.make_jaxpr(count)(weights, x)
        if not all(_jax_compat.dead_inputs(jaxpr, [True])):
            raise ValueError(
                "the count that the loss returns depends on the model's output; "
                "it must depend on the batch alone, such as the sum of weights"
            )
        value = total(count(weights, x))
        return value, jnp.where(value > 0, 1 / jnp.where(value > 0, value, 1), 0)

    def _outer_shapes(self):
        compute = COMPUTE[self.layout.precision]
        return [
            jax.ShapeDtypeStruct(used_shape(s, self.layout), compute)
            for s in self.parts.outer(self.parts.splits)
        ]
