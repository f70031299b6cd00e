"""What a step costs, as formulas: operations, bytes stored, bytes each axis sends.

The one idea: nothing is measured and nothing is fitted. Operations follow from the dims of the
parameters; bytes on the wire from where `region` and `splits` put each gather and each reduction.
What they say equals what is read back from the compiled program, to the byte.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.costs_blocks import over_context, over_tensor
from jaxpar.costs_pipeline import Passes, over_pipe, passes, stored_model
from jaxpar.costs_reads import Reads, reads
from jaxpar.dims import RULES
from jaxpar.layout import AXES, BATCH_AXES, Layout
from jaxpar.loss import CHUNK
from jaxpar.parts import take_apart
from jaxpar.region import COMPUTE, reduces_last
from jaxpar.splits import Split, padded_size, stored_shape

FP32 = 4


# ---- operations


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one sequence in one training step, by what needs them."""

    matmul_parameters: int
    matmul: int
    attention: int

    @property
    def total(self) -> int:
        """All of it: what model FLOPs utilization (MFU) counts."""
        return self.matmul + self.attention


def model_flops(model, seq_len: int, causal: bool = True) -> ModelFlops:
    """Model FLOPs of one sequence of `seq_len` tokens, forward and backward, nothing recomputed.

    6 operations per token and matmul parameter, and 12 x seq_len x heads x head_dim per token and
    layer for attention, half of that where `causal` (a token sees half the others). That is the
    definition of model FLOPs in PaLM (arXiv 2204.02311, appendix B) with the half for causal
    attention, which PaLM does not take. Matmul parameters are the matrices: no biases, no norm
    scales, no lookups in the token or position table, but the head's product, tied or not; of
    experts those that a token passes through. `model` is a jaxpar model, of arrays or of shapes.
    Raises ValueError for a parameter with two or more dimensions that does not name its dims.
    """
    parameters, c = matmul_parameters(model), model.config
    attention = 12 * c.num_layers * c.num_heads * c.head_dim * seq_len**2
    return ModelFlops(parameters, 6 * parameters * seq_len, attention // (2 if causal else 1))


def training_flops(model, seq_len: int) -> int:
    """Model FLOPs of one sequence in one step, in all: `model_flops(model, seq_len).total`."""
    return model_flops(model, seq_len).total


def matmul_parameters(model) -> int:
    """Number of parameters a token is multiplied with on its way through the model."""
    is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
    count, head = 0, 0
    for keys, leaf in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_variable)[0]:
        shape = (leaf.get_value() if is_variable(leaf) else leaf).shape
        dims = leaf.get_metadata().get("dims") if is_variable(leaf) else None
        if dims is None and len(shape) > 1:
            path = jax.tree_util.keystr(keys, simple=True, separator=".")
            raise ValueError(
                f"{path} {shape} does not name its dims, so its operations are not "
                "known; make it with jaxpar.nn.param(value, dims)"
            )
        inner = {d for d in dims or () if d != "layers"}
        if inner == {"vocab", "embed"}:
            head = math.prod(shape)
        elif "embed" in inner and len(inner) > 1 and "positions" not in inner:
            active = {"experts", "ffn"} <= inner
            count += (
                math.prod(shape) * model.config.experts_per_token // model.config.num_experts
                if active
                else math.prod(shape)
            )
    return count + head


# ---- bytes stored


def state_bytes(plan) -> dict[str, int]:
    """Path -> bytes one device stores, for every array of a plan's state, in its order."""
    return {s.path: math.prod(stored_shape(s, plan.layout)) * s.dtype.itemsize for s in plan.splits}


# ---- bytes sent


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One kind of collective in a step, in the terms of `cluster.hlo_collectives.Collective`.

    `what`: a parameter's path or a place in the model. `bytes`: payload of one execution per
    device: the gathered result, the input of a reduce-scatter, the buffer that is reduced or
    exchanged. `count`: executions per step. `devices`: members of a group.

    >>> Transfer("norm.scale", "all-reduce", ("data",), count=1, bytes=80, devices=8).wire_bytes
    140
    """

    what: str
    op: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    devices: int

    @property
    def total_bytes(self) -> int:
        """Payload per step and device."""
        return self.count * self.bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes one device sends in a step, on a ring of n devices: (n-1)/n of the payload, an
        all-reduce twice that, a permutation all of it; rounded up for each execution."""
        if self.op == "collective-permute":
            return self.total_bytes
        times = 2 if self.op == "all-reduce" else 1
        return self.count * -(-times * self.bytes * (self.devices - 1) // self.devices)


def parameter_traffic(model, layout: Layout) -> list[Transfer]:
    """What parameters and their gradients send in a step of m microbatches, parameter by parameter.

    Parameters travel in the compute type, gradients in fp32. ZeRO 0: one all-reduce; on one stage
    one for each block, as the last microbatch goes back through them (`region.reduces_last`). ZeRO
    1: one all-gather, one reduce-scatter. ZeRO 2: one all-gather, m reduce-scatters. ZeRO 3: for
    every use an all-gather (a block: forward and backward, with remat "stage" the second forward as
    well; on one stage one more of what only the forward reads, since the last block's weights come
    for both; embedding and head: once each) and m reduce-scatters (arXiv 1910.02054, section 7, per
    microbatch). What ZeRO leaves whole, and the shards along `pipe`, `replica` or `tensor` that
    hold copies, are all-reduced as often as gradients are reduced. A padded vocabulary travels by
    all-to-all as well. With `pipe` a device sends for its own stage's layers, padding included, and
    ZeRO 2 and 3 reduce a tied table once for each of its two uses. Where stages differ, the busiest
    is counted. Raises ValueError for axes these formulas do not know.
    """
    _check_axes(layout)
    model = stored_model(model, layout)
    parts = take_apart(model, layout)
    known = reads(model, parts, layout) if layout.zero >= 2 else None
    often = passes(model, layout)
    return [
        row
        for i, (split, inside) in enumerate(zip(parts.splits, parts.is_layer, strict=True))
        for row in _parameter(split, inside, *_uses(i, inside, known, often, layout), layout)
    ]


def _uses(
    i: int, inside: bool, known: Reads | None, often: Passes, layout: Layout
) -> tuple[int, int]:
    """How often leaf i is brought and its gradient given back, in a step."""
    m = layout.microbatches
    if layout.zero < 2:
        return 1, (often.backward // m if inside and reduces_last(layout) else 1)
    if inside:
        again = known.backward[i] + (layout.remat == "stage")
        there, back = often.forward + often.backward * again, often.backward
        if layout.pipe == 1:  # the last block's come once for both passes, see pipeline.ahead
            there += m * (1 - again)
    else:
        there = m * (known.embed[i] + known.loss[i])
        back = there if layout.pipe > 1 else m
    return (there if layout.zero == 3 else 1), back


def _parameter(split: Split, inside: bool, there: int, back: int, layout: Layout) -> list[Transfer]:
    each_block = inside and layout.zero == 3
    item = jnp.dtype(COMPUTE[layout.precision]).itemsize
    rows = [
        Transfer(split.path, op, axes, there, n * item, layout.size(axes))
        for op, axes, n in _moves(split, each_block, layout)
    ]
    each_block = inside and (layout.zero >= 2 or reduces_last(layout))
    opposite = {"all-gather": "reduce-scatter", "all-to-all": "all-to-all"}
    moves = [(opposite[op], axes, n) for op, axes, n in _moves(split, each_block, layout)]
    if split.vary_axes:
        copies = tuple(a for a in AXES if a in split.vary_axes)
        moves.append(("all-reduce", copies, _stored(split, each_block, layout)))
    return rows + [
        Transfer(split.path, op, axes, back, n * FP32, layout.size(axes)) for op, axes, n in moves
    ]


def _stored(split: Split, one_layer: bool, layout: Layout) -> int:
    return math.prod(stored_shape(split, layout)[one_layer:])


def _moves(split: Split, one_layer: bool, layout: Layout):
    """(op, axes, elements of the payload) of what `splits.fetch` does."""
    elements = _stored(split, one_layer, layout)
    if split.zero_dim is not None:
        elements *= layout.size(split.zero_axes)
        yield "all-gather", split.zero_axes, elements
    if split.uneven is not None and split.uneven[0] == "pad" and split.uneven[3] is not None:
        _, dim, over, _ = split.uneven
        size = split.shape[dim]
        yield "all-to-all", over, elements // size * padded_size(size, layout.size(over))


def activation_traffic(model, layout: Layout, global_batch: int, seq_len: int) -> list[Transfer]:
    """What activations send over `pipe`, `tensor` and `context` in a step, and the loss over the
    batch axes and `context` (whose part has its formulas in `costs_blocks`).

    A = rows of a microbatch x seq_len / context x embed x bytes of the compute type. With sequence
    parallelism a block sends 2 all-gathers and 2 reduce-scatters of A forward and as many backward
    (arXiv 2205.05198, section 4.2.2); embedding and head one of each. Without it, all-reduces: a
    block 2 forward and 2 backward, the embedding 1 forward, the head 1 backward. Recomputing a
    block (remat dots, block, offload) repeats its forward but for the last sum, remat "stage" all
    of it. Cross entropy reduces 3 fp32 numbers per token over the vocabulary's axes. Stages send
    what lies between blocks (A, with sequence parallelism A / tensor): a permutation for each
    exchange of the table, and per microbatch 4 all-reduces over `pipe`: of what the embedding
    looked up and of its gradient, of the head's input and of its gradient. Raises ValueError for
    axes these formulas do not know.
    """
    _check_axes(layout)
    c, rows = model.config, _reductions_of_loss(layout)
    tokens = global_batch // layout.size(BATCH_AXES) // layout.microbatches * seq_len
    tokens //= layout.context
    size = tokens * c.embed_dim * jnp.dtype(COMPUTE[layout.precision]).itemsize
    if layout.tensor > 1:
        rows += [Transfer(*row) for row in over_tensor(layout, passes(model, layout), size)]
    if layout.pipe > 1:
        held = size // layout.tensor if layout.sequence_parallel else size
        rows += [Transfer(*row, held, layout.pipe) for row in over_pipe(layout)]
    if layout.context > 1:
        sent = over_context(c, layout, passes(model, layout), global_batch, seq_len)
        rows += [Transfer(*row) for row in sent]
    axes = layout.present(RULES["vocab"])
    if not axes:
        return rows
    chunks = -(-tokens // CHUNK)
    count, numbers = layout.microbatches * chunks, -(-tokens // chunks) * FP32
    return rows + [
        Transfer(
            f"cross entropy, {what}", "all-reduce", axes, count, numbers * n, layout.size(axes)
        )
        for what, n in (("maximum", 1), ("sum and target", 2))
    ]


def _reductions_of_loss(layout: Layout) -> list[Transfer]:
    axes = layout.present((*BATCH_AXES, "context"))
    return [
        Transfer(what, "all-reduce", axes, 1, FP32, layout.size(axes))
        for what in ("loss", "count of tokens")
        if axes
    ]


def _check_axes(layout: Layout) -> None:
    if layout.expert > 1:
        raise ValueError(
            f"expert={layout.expert}: what this axis sends has no formula here; the formulas know "
            "pipe, replica, data, context and tensor; use expert=1"
        )
