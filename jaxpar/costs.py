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

from jaxpar import _jax_compat
from jaxpar.layout import BATCH_AXES, Layout
from jaxpar.loss import CHUNK
from jaxpar.nn.parallel import Settings
from jaxpar.parts import Parts, take_apart
from jaxpar.pipeline import stage
from jaxpar.region import COMPUTE
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
        all-reduce twice that; rounded up for each execution."""
        passes = 2 if self.op == "all-reduce" else 1
        return self.count * -(-passes * self.bytes * (self.devices - 1) // self.devices)


def parameter_traffic(model, layout: Layout) -> list[Transfer]:
    """What parameters and their gradients send in a step of m microbatches, parameter by parameter.

    Parameters travel in the compute type, gradients in fp32. ZeRO 0: one all-reduce. ZeRO 1: one
    all-gather, one reduce-scatter. ZeRO 2: one all-gather, m reduce-scatters. ZeRO 3: for every
    use an all-gather (a block: forward and backward; embedding and head: once each) and m
    reduce-scatters (arXiv 1910.02054, section 7, per microbatch). What ZeRO leaves whole, and the
    shards along `replica` or `tensor` that hold copies, are all-reduced as often as gradients are
    reduced. A padded vocabulary travels by all-to-all as well. Raises ValueError for axes that
    these formulas do not know.
    """
    _check_axes(layout)
    parts = take_apart(model, layout)
    uses = fetches(model, parts, layout) if layout.zero == 3 else (1,) * len(parts.splits)
    return [
        row
        for split, inside, times in zip(parts.splits, parts.is_layer, uses, strict=True)
        for row in _parameter(split, inside, times, layout)
    ]


def _parameter(split: Split, inside: bool, uses: int, layout: Layout) -> list[Transfer]:
    blocks = split.shape[0] if inside else 1
    each_block = inside and layout.zero == 3
    there = layout.microbatches * uses * blocks if layout.zero == 3 else 1
    item = jnp.dtype(COMPUTE[layout.precision]).itemsize
    rows = [
        Transfer(split.path, op, axes, there, n * item, layout.size(axes))
        for op, axes, n in _moves(split, each_block, layout)
    ]
    each_block = inside and layout.zero >= 2
    back = layout.microbatches * blocks if layout.zero >= 2 else 1
    opposite = {"all-gather": "reduce-scatter", "all-to-all": "all-to-all"}
    moves = [(opposite[op], axes, n) for op, axes, n in _moves(split, each_block, layout)]
    if split.vary_axes:
        moves.append(("all-reduce", split.vary_axes, _stored(split, each_block, layout)))
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


def fetches(model, parts: Parts, layout: Layout) -> tuple[int, ...]:
    """How often ZeRO 3 brings each leaf: outer ones per microbatch, a layer's per block as well.

    A layer's parameter comes for the forward pass, and again for the backward pass unless that
    does not read it (biases that are only added; norm scales that are kept as they are small).
    Read off the traced model, which runs nothing.
    """
    compute = COMPUTE[layout.precision]
    leaves = [jax.ShapeDtypeStruct(s.shape, compute) for s in parts.splits]
    outer = parts.outer(leaves)
    layers = [jax.ShapeDtypeStruct(w.shape[1:], compute) for w in parts.layers(leaves)]
    shape = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    batch = dict(
        tokens=shape,
        targets=shape,
        positions=shape,
        weights=jax.ShapeDtypeStruct((1, 8), jnp.float32),
    )

    def prepare(batch):
        batch = {**batch, "settings": Settings(), "rows": jnp.arange(1)}
        return model.prepare(batch) if hasattr(model, "prepare") else batch

    def embed(outer, batch):
        return parts.model(outer).embed(prepare(batch))

    def loss(outer, x, batch):
        return parts.model(outer).loss(x, prepare(batch))[0]

    def block(weights, x, batch):
        return model.block(parts.layer_tree.unflatten(weights), x, {**prepare(batch), "layer": 0})

    x = jax.eval_shape(embed, outer, batch)
    first = _reads(embed, outer, batch)
    last = _reads(loss, outer, x, batch) if hasattr(model, "loss") else [not r for r in first]
    again = _read_by_backward(block, layers, x, batch, layout.remat)
    return tuple(
        parts.join([a + b for a, b in zip(first, last, strict=True)], [1 + r for r in again])
    )


def _read_by_backward(block, weights: list, x, batch, remat: str) -> list[bool]:
    """Which weights of a block its backward pass reads, as `pipeline.stage` keeps things."""
    found = {}

    def forward(weights, x, batch):
        def run(weights, x):
            return block(weights, x, batch)

        if remat in stage.POLICIES:
            run = jax.checkpoint(run, policy=stage.POLICIES[remat])
        kept, found["pullback"] = jax.tree.flatten(jax.vjp(run, weights, x)[1])
        found["place"] = [next((i for i, w in enumerate(weights) if w is a), None) for a in kept]
        return kept

    kept = jax.eval_shape(forward, weights, x, batch)
    read = _reads(lambda kept, dx: found["pullback"].unflatten(kept)(dx), kept, x)
    live = {place for place, is_read in zip(found["place"], read, strict=True) if is_read}
    return [i in live for i in range(len(weights))]


def _reads(function, weights: list, *rest) -> list[bool]:
    """Which of `weights` the results of function(weights, *rest) depend on."""
    jaxpr = jax.make_jaxpr(function)(weights, *rest)
    dead = _jax_compat.dead_inputs(jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    return [not d for d in dead[: len(weights)]]


def activation_traffic(model, layout: Layout, global_batch: int, seq_len: int) -> list[Transfer]:
    """What activations send over `tensor` in a step, and the loss over the batch axes.

    A = rows of a microbatch x seq_len x embed x bytes of the compute type. With sequence
    parallelism a block sends 2 all-gathers and 2 reduce-scatters of A forward and as many backward
    (arXiv 2205.05198, section 4.2.2); embedding and head one of each. Without it, all-reduces: a
    block 2 forward and 2 backward, the embedding 1 forward, the head 1 backward. Recomputing a
    block (remat dots, block, offload) repeats its forward but for the last sum. Cross entropy
    reduces 3 fp32 numbers per token. Raises ValueError for axes these formulas do not know.
    """
    _check_axes(layout)
    rows = _reductions_of_loss(layout)
    if layout.tensor == 1:
        return rows
    m, layers, c = layout.microbatches, model.config.num_layers, model.config
    tokens = global_batch // layout.size(BATCH_AXES) // m * seq_len
    size = tokens * c.embed_dim * jnp.dtype(COMPUTE[layout.precision]).itemsize
    remat = layout.remat != "none"
    gather, scatter, both = "all-gather", "reduce-scatter", "all-reduce"
    if layout.sequence_parallel:
        table = [
            ("embedding forward", scatter, 1),
            ("embedding backward", gather, 1),
            ("blocks forward", gather, 2 * layers),
            ("blocks forward", scatter, 2 * layers),
            ("blocks backward", gather, 2 * layers),
            ("blocks backward", scatter, 2 * layers),
            ("blocks recomputed", gather, 2 * layers * remat),
            ("blocks recomputed", scatter, layers * remat),
            ("head forward", gather, 1),
            ("head backward", scatter, 1),
        ]
    else:
        table = [
            ("embedding forward", both, 1),
            ("blocks forward", both, 2 * layers),
            ("blocks backward", both, 2 * layers),
            ("head backward", both, 1),
            ("blocks recomputed", both, layers * remat),
        ]
    rows += [
        Transfer(what, op, ("tensor",), m * count, size, layout.tensor)
        for what, op, count in table
        if count
    ]
    chunks = -(-tokens // CHUNK)
    chunk = -(-tokens // chunks)
    rows += [
        Transfer(
            f"cross entropy, {what}", both, ("tensor",), m * chunks, chunk * n * FP32, layout.tensor
        )
        for what, n in (("maximum", 1), ("sum and target", 2))
    ]
    return rows


def _reductions_of_loss(layout: Layout) -> list[Transfer]:
    axes = layout.present(BATCH_AXES)
    return [
        Transfer(what, "all-reduce", axes, 1, FP32, layout.size(axes))
        for what in ("loss", "count of tokens")
        if axes
    ]


def _check_axes(layout: Layout) -> None:
    for axis in ("pipe", "expert", "context"):
        if layout.axis_sizes[axis] > 1:
            raise ValueError(
                f"{axis}={layout.axis_sizes[axis]}: what this axis sends has no formula here; the "
                f"formulas know replica, data and tensor; use {axis}=1"
            )
