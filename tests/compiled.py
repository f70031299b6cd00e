"""Compiled gradient functions, kept for all tests of a run, and what is read from them."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
from flax import nnx

import jaxpar as jp
from jaxpar.cluster import hlo
from jaxpar.models import gpt2, llama

_LLAMA = llama.preset("tiny", embed_dim=32, ffn_dim=64, head_dim=4, vocab_size=64)
MODELS = {
    "llama": (llama, _LLAMA),
    "llama_kv2": (llama, dataclasses.replace(_LLAMA, num_kv_heads=2)),
    "llama_tied": (
        llama,
        dataclasses.replace(_LLAMA, tie_embeddings=True, qk_norm=True, qkv_bias=True),
    ),
    "gpt2": (gpt2, gpt2.preset("tiny", embed_dim=32, ffn_dim=64, head_dim=4, vocab_size=61)),
    "wide": (llama, dataclasses.replace(_LLAMA, embed_dim=64, ffn_dim=256, num_heads=4,
                                        num_kv_heads=4, head_dim=16)),
}  # fmt: skip
"""Name -> (module, config). `wide` has blocks whose weights outweigh everything else."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One gradient function under a layout; `lowered` is the program before optimization."""

    plan: jp.Plan
    rows: int
    seq_len: int
    lowered: jax.stages.Lowered
    program: jax.stages.Compiled

    @functools.cached_property
    def text(self) -> str:
        return self.program.as_text()

    @functools.cached_property
    def collectives(self) -> list[hlo.Collective]:
        return hlo.collectives(self.text, self.plan.layout.axis_sizes)

    @functools.cached_property
    def memory(self):
        return self.program.memory_analysis()

    @functools.cached_property
    def flops(self) -> int:
        counted = hlo.flops(self.text)
        assert not counted.unread and not counted.unknown_loops
        return counted.total


def payload(collectives: list[hlo.Collective]) -> dict:
    """(op, axes) -> payload bytes per step and device, in the types the program asked for."""
    found = Counter()
    for c in collectives:
        assert not c.warning, c
        found[c.op, c.axes] += c.count * c.asked_bytes
    return dict(found)


def model_shapes(name: str, **changes):
    """The model without its numbers."""
    module, config = MODELS[name]
    config = dataclasses.replace(config, **changes)
    return jax.eval_shape(lambda key: module.Model(config, rngs=nnx.Rngs(key)), jax.random.key(0))


def batch_shapes(plan: jp.Plan, rows: int, seq_len: int) -> dict:
    def array(dtype):
        return jax.ShapeDtypeStruct((rows, seq_len), dtype, sharding=plan.batch_sharding)

    return dict(tokens=array(jnp.int32), targets=array(jnp.int32), weights=array(jnp.float32))


def trace(name: str, layout: jp.Layout, rows: int = 32, seq_len: int = 16, **changes):
    """(plan, the traced gradient function) of a model with some fields of its config changed."""
    module, config = MODELS[name]
    config = dataclasses.replace(config, **changes)
    plan = jp.make_plan(layout, lambda key: module.Model(config, rngs=nnx.Rngs(key)),
                        devices=jax.devices()[: layout.num_devices])  # fmt: skip
    model = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                         jax.eval_shape(plan.placement.store, plan.state),
                         plan.shardings)  # fmt: skip
    function = jax.jit(plan.value_and_grad(module.loss), out_shardings=(None, plan.shardings))
    return plan, function.trace(model, batch_shapes(plan, rows, seq_len))


@functools.cache
def compiled(name: str, layout: jp.Layout, rows: int = 32, seq_len: int = 16, **changes):
    """The compiled gradient function: (model, batch) -> (loss, gradients)."""
    plan, traced = trace(name, layout, rows, seq_len, **changes)
    lowered = traced.lower()
    return Compiled(plan, rows, seq_len, lowered, lowered.compile())
