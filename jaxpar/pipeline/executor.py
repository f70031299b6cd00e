"""One executor for every schedule: scans over the table's ticks, forward and backward written out.

Runs inside the manual region, on every stage alike. A tick is: gradients of the last tick arrive;
embed; F; activations are sent; head and loss; B; the gradient reaches the embedding; activations
arrive. Embedding and head are split over the stages, so every stage does an equal share of them.
Values live in ring buffers whose slots the table gives; nothing grows with the microbatches.
"""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar import _jax_compat
from jaxpar.nn.parallel import vary, vary_like, zero_after
from jaxpar.pipeline import buffers, stage, ticks
from jaxpar.pipeline.branch import update_when, when
from jaxpar.pipeline.buffers import AXIS
from jaxpar.pipeline.program import Program, vjp_of_read
from jaxpar.pipeline.stage import Ring, Structure


def run(
    program: Program,
    outer: list,
    layers: list,
    microbatches: dict,
    outer_sums: list,
    layer_sums: list,
    scale,
):
    """Runs every microbatch, arrays [M, b, t], forward and backward.

    Returns (loss sum, outer sums, layer sums); `scale` multiplies the loss before the backward.
    """
    tick = Tick(program, outer, layers, microbatches, scale, Structure())
    carry = tick.start(outer_sums, layer_sums)
    whole_stage = program.stack.remat == "stage"
    for number, segment in enumerate(ticks.segments(program.table)):
        scanned = jax.tree.map(jnp.asarray, ticks.arrays(program.table, segment, whole_stage))
        with jax.named_scope(f"segment {number}"):  # tells them apart in the compiled program
            carry, _ = lax.scan(partial(tick.run, segment), carry, scanned)
    return carry["loss"], carry["outer"], carry["layers"]


@dataclasses.dataclass(frozen=True)
class Tick:
    """The body of the scans: what one tick does to the carry."""

    program: Program
    outer: list
    layers: list
    microbatches: dict
    scale: jax.Array
    structure: Structure

    def start(self, outer_sums, layer_sums) -> dict:
        """Empty buffers, one entry per slot of the stage that needs most."""
        table, whole = self.program.table, self.program.stack.remat == "stage"
        me, batch = lax.axis_index(AXIS), self._batch(vary(jnp.int32(0), (AXIS,)))
        x = buffers.typed(
            lambda: self.program.embed(self.program.fetch_outer(self.outer, ()), batch)
        )
        span = self.program.span(me, vary(jnp.int32(0), (AXIS,)))
        y, kept = buffers.typed(lambda: self._forward(buffers.blank(x), batch, span))
        slots_x = table.slots_stage if whole else table.slots_input
        spare = self.program.idle != "skip"  # -1, the last slot, takes what bubbles compute
        carry = {
            "x": buffers.buffer(x, max(slots_x)),
            "kept": [buffers.buffer(k, max(table.slots_kept) + spare) for k in kept],
            "grad": buffers.buffer(y, max(table.slots_grad)),
            "dx": buffers.blank(y),
            "outer": outer_sums,
            "layers": layer_sums,
        }
        if whole:  # what the forward that B runs again keeps, one microbatch's
            again = lambda: stage.forward(  # noqa: E731
                self.program.stack, self.layers, buffers.blank(x), batch, span, self.structure
            )
            carry["again"] = [buffers.buffer(k, 1) for k in buffers.typed(again)[1]]
        if self.program.one_at_a_time:
            carry["zero"] = vary_like(jnp.float32(0), carry["dx"])
        if ticks.loss_gradient_waits(table):
            carry["loss_grad"] = buffers.buffer(y, max(table.slots_kept))
        loss, _ = buffers.typed(lambda: self._stored_loss(buffers.blank(x), jnp.int32(0)))
        return carry | {"loss": vary_like(jnp.zeros(loss.shape), buffers.blank(loss, axes=()))}

    def run(self, segment, carry: dict, now: dict):
        carry, at = dict(carry), now["alike"]
        me = lax.axis_index(AXIS)
        mine = {name: a[me] for name, a in now["stage"].items()}
        returns = [
            (mine[f"arrives_{i}"], self._permute(carry["dx"], pairs, carry))
            for i, pairs in segment.receives
        ]
        arrivals = []
        if segment.forward:
            entering = self._embed(segment.embed, at["embed"], carry)
            y = self._run_forward(mine, entering, me, carry)
            if returns:  # hides them behind F; without it XLA issues them after the head
                y, returns = lax.optimization_barrier((y, returns))
            for i, pairs in segment.sends:
                arrivals.append((mine[f"arrives_{i}"], self._permute(y, pairs, carry)))
            from_loss = self._head(segment.head, at, y, carry)
        for slot, value in returns:
            carry["grad"] = buffers.write(carry["grad"], slot, value)
        if segment.backward:
            if "loss_grad" in carry:
                from_loss = buffers.read(carry["loss_grad"], at["head_slot_used"])
            elif not segment.forward:
                from_loss = buffers.blank_like(carry["dx"])
            carry["dx"] = self._run_backward(mine, from_loss, me, carry)
            if arrivals:  # likewise behind B
                carry["dx"], arrivals = lax.optimization_barrier((carry["dx"], arrivals))
            self._embed_back(segment.embed_back, at["embed_back"], carry)
        for slot, value in arrivals:
            carry["x"] = buffers.write(carry["x"], slot, value)
        return carry, None

    @functools.cached_property
    def by_rows(self) -> bool:
        """Whether each stage takes a share of a microbatch's rows through the head."""
        outer, m = self.program.fetch_outer(self.outer, ()), jnp.int32(0)
        batch = self._batch(m)
        x = buffers.typed(lambda: self.program.embed(outer, batch))
        whole = lambda: self.program.loss(outer, lax.psum(buffers.blank(x), AXIS), batch)  # noqa: E731
        split = AXIS not in _jax_compat.varying_axes(buffers.typed(whole)[0])
        return not split and x.shape[0] % self.program.table.stages == 0

    # ---- the phases of a tick

    @jax.named_scope("embed")
    def _embed(self, often, m, carry):
        """x of the microbatch that enters the model; every stage looks up its part of the table."""

        def embed(m):
            return self.program.embed(self.program.fetch_outer(self.outer, (m,)), self._batch(m))

        if often == "never":
            return buffers.blank_like(carry["x"][0])
        return embed(m) if often == "always" else when(m >= 0, embed, m)

    @jax.named_scope("F")
    def _run_forward(self, mine, entering, me, carry):
        table, m, chunk = self.program.table, mine["f_microbatch"], mine["f_chunk"]
        whole = self.program.stack.remat == "stage"
        slot = mine["f_stage" if whole else "f_input"]
        first = jnp.asarray(table.parts)[me, chunk] == 0
        x = self._after(jnp.where(first, entering, buffers.read(carry["x"], slot)), carry)
        batch, span = self._batch(m), self.program.span(me, jnp.maximum(chunk, 0), m >= 0)
        y, carry["kept"] = self._forward(x, batch, span, Ring(carry["kept"], mine["f_kept"]))
        if whole:
            carry["x"] = buffers.write(carry["x"], jnp.where(first & (m >= 0), slot, -1), x)
        return y

    @jax.named_scope("head")
    def _head(self, often, at, y, carry):
        """Loss and its gradient of the microbatch that left the model, shared by all stages."""
        if often == "never":
            return buffers.blank_like(y)

        def head(state, y):
            loss, sums = state
            outer = self.program.fetch_outer(self.outer, (y,))
            loss_of = lambda w, y: self._loss(w, y, at["head"])[0]  # noqa: E731
            value, back = vjp_of_read(loss_of, outer, y)
            gradients, dx = back(vary_like(self.scale, value))
            return loss + value, self._add(sums, gradients), vary_like(dx, y)

        state = (carry["loss"], carry["outer"])
        if often == "always":
            loss, sums, dx = head(state, y)
        else:
            loss, sums, dx = update_when(
                at["head"] >= 0, lambda s, y: head(s[:2], y), (*state, buffers.blank_like(y)), y
            )
        carry["loss"], carry["outer"] = vary_like(loss, carry["loss"]), sums
        if "loss_grad" in carry:
            carry["loss_grad"] = buffers.write(carry["loss_grad"], at["head_slot"], dx)
        return dx

    @jax.named_scope("B")
    def _run_backward(self, mine, from_loss, me, carry):
        table, m, chunk = self.program.table, mine["b_microbatch"], mine["b_chunk"]
        last = jnp.asarray(table.parts)[me, chunk] == table.parts.max()
        dy = self._after(
            jnp.where(last, from_loss, buffers.read(carry["grad"], mine["b_grad"])), carry
        )
        whole = self.program.stack.remat == "stage"
        x = self._after(buffers.read(carry["x"], mine["b_stage"]), carry) if whole else None
        kept = Ring(carry["kept"], mine["b_kept"])
        stack, known = self.program.stack, self.structure
        batch, span = self._batch(m), self.program.span(me, jnp.maximum(chunk, 0), m >= 0)
        if whole:
            _, carry["again"] = stage.forward(
                stack, self.layers, x, batch, span, known, Ring(carry["again"], jnp.int32(0))
            )
            kept = Ring(carry["again"], jnp.int32(0))
        dx, carry["layers"] = stage.backward(
            stack, self.layers, kept, dy, batch, carry["layers"], span, known
        )
        return dx

    @jax.named_scope("embed_back")
    def _embed_back(self, often, m, carry):
        """The embedding's gradient, from the first stage to every stage's part of the table."""
        if often == "never":
            return
        first = ticks.places(self.program.table)[0][0]

        def back(sums, dx):
            batch = self._batch(m)
            outer = self.program.fetch_outer(self.outer, (dx,))
            _, pullback = vjp_of_read(lambda w: self.program.embed(w, batch), outer)
            (gradients,) = pullback(jnp.where(lax.axis_index(AXIS) == first, dx, 0))
            return self._add(sums, gradients)

        if often == "always":
            carry["outer"] = back(carry["outer"], carry["dx"])
        else:
            carry["outer"] = update_when(m >= 0, back, carry["outer"], carry["dx"])

    # ---- pieces

    def _permute(self, x, pairs, carry: dict):
        """x from the stage that sends it to this one, zeros where none does.

        XLA:CPU does not wait for one collective before it starts the next, and cannot tell two
        permutations apart that are under way at once. Where the program asks for it, x therefore
        depends on what the permutation before brought. On GPUs they have a stream of their own.
        """
        if not self.program.one_at_a_time:
            with _jax_compat.xla_metadata(_xla_gpu_collective_stream="p2p"):
                return lax.ppermute(x, AXIS, pairs)
        arrived = lax.ppermute(jnp.where(carry["zero"] > 0, 0, x), AXIS, pairs)
        carry["zero"] = zero_after(arrived)
        return arrived

    def _after(self, x, carry: dict):
        """x, which exists only after the permutation before, where blocks permute themselves."""
        waits = self.program.one_at_a_time and self.program.idle == "everywhere"
        return jnp.where(carry["zero"] > 0, 0, x) if waits else x

    def _batch(self, m, share: bool = False) -> dict:
        """Microbatch m as the model sees it; with `share` this stage's part of its rows."""

        def pick(a):
            a = lax.dynamic_index_in_dim(a, jnp.maximum(m, 0), keepdims=False)
            rows = a.shape[0] // self.program.table.stages
            if not share:
                return a
            return lax.dynamic_slice_in_dim(a, lax.axis_index(AXIS) * rows, rows, axis=0)

        return self.program.prepare(jax.tree.map(pick, self.microbatches))

    def _forward(self, x, batch, span, ring=None):
        stack = self.program.stack
        if stack.remat in ("stage", "nothing"):
            return stage.apply(stack, self.layers, x, batch, span), []
        return stage.forward(stack, self.layers, x, batch, span, self.structure, ring)

    def _loss(self, outer, y, m):
        """(sum, count) of a microbatch whose last activations the last stage holds in y.

        A head split over pipe (its sum is equal on all stages) gets x by an all-reduce. Any other
        head gets a share of the rows on each stage by a reduce-scatter, or where the rows do not
        divide is counted on the last stage alone.
        """
        last = ticks.places(self.program.table)[1][0]
        y = jnp.where(lax.axis_index(AXIS) == last, y, 0)
        if not self.by_rows:
            x = vary(lax.psum(y, AXIS), (AXIS,))  # its gradient is summed here, in y's type
            loss_sum, count = self.program.loss(outer, x, self._batch(m))
            if AXIS in _jax_compat.varying_axes(loss_sum):
                loss_sum = jnp.where(lax.axis_index(AXIS) == last, loss_sum, 0)
            return loss_sum, count
        x = lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)
        return self.program.loss(outer, x, self._batch(m, share=True))

    def _stored_loss(self, y, m):
        return self._loss(self.program.fetch_outer(self.outer, (y,)), y, m)

    def _add(self, sums, gradients):
        gradients = self.program.give_back_outer(gradients)
        pairs = zip(sums, gradients, strict=True)
        return [s if g is None else s + g.astype(jnp.float32) for s, g in pairs]
