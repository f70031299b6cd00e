"""Bytes that a step needs on one device, as formulas: state, weights, gradients, what is kept.

The one idea: the largest moment of a step is the backward pass of a block, so what lives then is
summed up; not so for a small stack under a large vocabulary, where it is the head. Nothing is
measured; what XLA counts for the compiled step is a few percent away (`benchmarks/memory.py`).
"""

import dataclasses
import math

import jax.numpy as jnp

from jaxpar.costs import FP32, state_bytes
from jaxpar.layout import BATCH_AXES, Layout
from jaxpar.parts import take_apart
from jaxpar.placement import pipeline_table
from jaxpar.region import COMPUTE, reduces_last
from jaxpar.splits import Split, stored_shape, used_shape

REMATS = ("block", "offload", "stage")
"""Remat policies that these formulas know."""


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on one device, the most loaded, at the largest moment of a training step.

    `state`: parameters and optimizer state as they are stored. `batch`: its tokens, targets and
    weights. `weights`: parameters as layers use them, in the compute type. `gradients`: their fp32
    sums. `kept`: what the forward pass keeps for the backward. `buffers`: what stages exchange.
    `working`: the block whose backward pass runs at that moment.
    """

    state: int
    batch: int
    weights: int
    gradients: int
    kept: int
    buffers: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


def step_memory(plan, model, global_batch: int, seq_len: int) -> StepMemory:
    """Bytes of one step of `plan` on [global_batch, seq_len] tokens.

    `model` is the plan's model, of arrays or shapes, in storage order (see `stored_model`). For
    decoders with a config (`jaxpar.models.config.DecoderConfig`) and a gated feed-forward part.
    Raises ValueError for a remat policy or an attention kernel that these formulas do not know.
    """
    layout = plan.layout
    if layout.remat not in REMATS:
        raise ValueError(
            f"remat={layout.remat!r} keeps what XLA's fusions leave, for which there is no formula "
            f"here; use one of {', '.join(REMATS)}"
        )
    if plan.attention_kernel == "xla":
        raise ValueError(
            "attention_kernel='xla' stores the matrix of scores, for which there is no formula "
            "here; plan with cudnn (GPUs, bf16) or blockwise"
        )
    sizes = _Sizes.of(model, layout, global_batch, seq_len)
    parts = take_apart(model, layout)
    outer, layers = parts.outer(parts.splits), parts.layers(parts.splits)
    backward = (
        _weights(outer, layers, layout),
        _gradients(outer, layers, layout),
        _kept(layers, sizes, layout),
        _buffers(sizes, layout),
        _block(layers, sizes, layout),
    )
    batch = 3 * FP32 * global_batch * seq_len // layout.size((*BATCH_AXES, "context"))
    return StepMemory(sum(state_bytes(plan).values()), batch, *backward)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Bytes of one microbatch's arrays on one device, in the compute type.

    `between`: x between blocks. `whole`: x with the whole sequence. `hidden`: one array of the
    feed-forward part. `heads`, `kv_heads`: queries, and keys or values. `rows`: of the microbatch.
    """

    between: int
    whole: int
    hidden: int
    heads: int
    kv_heads: int
    rows: int

    @classmethod
    def of(cls, model, layout: Layout, global_batch: int, seq_len: int) -> "_Sizes":
        c, t = model.config, layout.tensor
        rows = global_batch // layout.size(BATCH_AXES) // layout.microbatches
        tokens = rows * seq_len // layout.context
        item = jnp.dtype(COMPUTE[layout.precision]).itemsize
        whole = tokens * c.embed_dim * item
        return cls(
            between=whole // t if layout.sequence_parallel else whole,
            whole=whole,
            hidden=tokens * c.ffn_dim // t * item,
            heads=tokens * c.num_heads // t * c.head_dim * item,
            kv_heads=tokens * max(c.num_kv_heads // t, 1) * c.head_dim * item,
            rows=rows,
        )


def _weights(outer: list[Split], layers: list[Split], layout: Layout) -> int:
    """Gathered weights: all of them at once, or with ZeRO 3 those of two blocks."""
    item = jnp.dtype(COMPUTE[layout.precision]).itemsize
    if layout.zero == 3:
        blocks = 2 if layout.pipe == 1 else 1
        return blocks * _used(layers, layout) // _held(layers, layout) * item
    tables = _used(outer, layout) if layout.pipe > 1 or layout.microbatches > 1 else 0
    return (_used(layers, layout) + tables) * item


def _gradients(outer: list[Split], layers: list[Split], layout: Layout) -> int:
    """fp32 sums of all layers and, in a pipeline or with microbatches, of the tables; the head's
    gradient of this microbatch, which waits for the embedding's. Where the last microbatch gives
    sums back block by block, what it gave back; before there are sums if there is another."""
    stored = lambda splits: sum(math.prod(stored_shape(s, layout)) for s in splits)  # noqa: E731
    size = (lambda splits: _used(splits, layout)) if layout.zero < 2 else stored
    head = max(math.prod(used_shape(s, layout)) for s in outer)
    repeated = layout.pipe > 1 or layout.microbatches > 1
    held = size(layers)
    if reduces_last(layout):
        held = stored(layers) + (held if repeated else 0)
    return FP32 * (held + head + (size(outer) if repeated else 0))


def _kept(layers: list[Split], sizes: _Sizes, layout: Layout) -> int:
    """What the forward pass keeps: inputs of blocks, or of stages and one stage's residuals."""
    held = _held(layers, layout)
    if layout.remat == "offload":
        return 0
    if layout.pipe == 1:
        return held * sizes.between
    table = pipeline_table(layout)
    if layout.remat == "stage":
        inputs = max(table.slots_stage) * sizes.between
        return inputs + held * (_residuals(sizes) + _other_order(sizes, layout))
    per_chunk = held // layout.chunks
    spare = 1 if layout.computes_idle else 0  # takes what bubbles compute
    return (max(table.slots_kept) + spare) * per_chunk * sizes.between


def _residuals(sizes: _Sizes) -> int:
    """What one block's backward pass needs: the inputs of its norms, of its products and of
    attention, and attention's result (arXiv 2205.05198, section 4.1, without dropout)."""
    return (
        2 * sizes.between + 2 * sizes.whole + 3 * sizes.hidden
        + 4 * sizes.heads + 3 * sizes.kv_heads
    )  # fmt: skip


def _other_order(sizes: _Sizes, layout: Layout) -> int:
    """With several rows in a microbatch XLA keeps the inputs of products in two orders in memory,
    sequence outermost as they were gathered and row outermost; with one row these are the same."""
    if layout.tensor == 1 or sizes.rows == 1:
        return 0
    return 2 * sizes.whole + 3 * sizes.hidden


def _buffers(sizes: _Sizes, layout: Layout) -> int:
    """Activations and gradients that wait for their stage, and those just computed."""
    if layout.pipe == 1:
        return 0
    table = pipeline_table(layout)
    waiting = max(table.slots_input) if layout.remat != "stage" else 0
    return (waiting + max(table.slots_grad) + 3) * sizes.between


def _block(layers: list[Split], sizes: _Sizes, layout: Layout) -> int:
    """A block's backward pass at its largest, where the feed-forward part's input gradients are
    added: gathered inputs of both halves, the gradient that came, and two partial input gradients;
    four arrays of the feed-forward part; queries, attention's result, and x twice; the weights of
    the products under way."""
    item = jnp.dtype(COMPUTE[layout.precision]).itemsize
    weights = _used(layers, layout) // _held(layers, layout) * item
    if layout.remat == "stage":
        return 3 * sizes.whole + 4 * sizes.hidden + 2 * sizes.heads + 4 * sizes.between + weights
    return 5 * sizes.whole + 4 * sizes.hidden + 2 * sizes.heads + 4 * sizes.between + weights // 2


def _held(layers: list[Split], layout: Layout) -> int:
    """Layers that a device holds, padding included."""
    return used_shape(layers[0], layout)[0]


def _used(splits: list[Split], layout: Layout) -> int:
    return sum(math.prod(used_shape(s, layout)) for s in splits)
