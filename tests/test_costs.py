"""Costs are formulas: operations and bytes against numbers worked out by hand."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar as jp
from compiled import MODELS, compiled, model_shapes
from jaxpar import costs
from jaxpar.costs import Transfer
from jaxpar.models import gpt2, llama
from jaxpar.nn import param

# 2 layers, d 64, 4 heads and 2 kv heads of 16, gated ffn 256, vocabulary 1000
SMALL = dict(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=256,
             vocab_size=1000)  # fmt: skip


def shapes(module, config):
    return jax.eval_shape(lambda key: module.Model(config, rngs=nnx.Rngs(key)), jax.random.key(0))


# Operations


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True},
                                     {"qk_norm": True, "qkv_bias": True}], ids=str)  # fmt: skip
def test_model_flops_of_a_small_llama_equal_the_count_by_hand(options):
    found = costs.model_flops(shapes(llama, llama.preset("tiny", **SMALL, **options)), 128)
    assert found.matmul_parameters == 186_880
    assert found.matmul == 143_523_840
    assert found.attention == 12_582_912
    assert found.total == 156_106_752


def test_attention_that_is_not_causal_counts_twice():
    model = shapes(llama, llama.preset("tiny", **SMALL))
    assert costs.model_flops(model, 128, causal=False).attention == 25_165_824
    assert costs.training_flops(model, 128) == 156_106_752


def test_gpt2_counts_its_head_and_neither_positions_nor_biases():
    # per layer 4 d^2 of attention and 8 d^2 of the MLP; the tied table once
    found = costs.matmul_parameters(shapes(gpt2, gpt2.preset("124m")))
    assert found == 12 * 12 * 768**2 + 50_257 * 768


def test_llama_8b_multiplies_with_all_but_its_lookup_table_and_norms():
    rest = 128_256 * 4096 + (2 * 32 + 1) * 4096
    assert costs.matmul_parameters(shapes(llama, llama.preset("8b"))) == 8_030_261_248 - rest


def test_of_experts_those_that_a_token_passes_through_are_counted():
    class Experts(nnx.Module):
        def __init__(self):
            self.router = param(jnp.zeros((2, 64, 8)), ("layers", "embed", "experts"))
            self.up = param(jnp.zeros((2, 8, 64, 32)), ("layers", "experts", "embed", "ffn"))
            self.down = param(jnp.zeros((2, 8, 32, 64)), ("layers", "experts", "ffn", "embed"))
            self.config = types.SimpleNamespace(num_experts=8, experts_per_token=2)

    assert costs.matmul_parameters(Experts()) == 2 * (64 * 8 + 2 * 2 * 64 * 32)


def test_a_matrix_that_does_not_name_its_dims_is_refused():
    class Plain(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros((4, 8)))

    with pytest.raises(ValueError, match=r"weight \(4, 8\) does not name its dims.*nn.param"):
        costs.matmul_parameters(Plain())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_products_of_the_compiled_program_are_the_models_flops(name):
    run = compiled(name, jp.Layout(precision="fp32", microbatches=4))
    model = costs.model_flops(model_shapes(name), run.seq_len, causal=False)
    assert run.flops == run.rows * model.total


# Bytes stored


def test_states_per_device_are_divided_by_data_and_tensor_once():
    def init(key):
        model = llama.Model(MODELS["llama"][1], rngs=nnx.Rngs(key))
        return model, optax.adam(1e-3).init(model)

    plan = jp.make_plan(jp.Layout(data=4, tensor=2, zero=3), init)
    sizes = {s.path: s for s in plan.splits}
    count = sum(leaf.size for leaf in jax.tree.leaves(plan.state[0]))
    whole_over_tensor = 2 * 4 * 32 + 32  # norm scales
    found = costs.state_bytes(plan)
    assert list(found) == list(sizes)
    # fp32 master weights and two moments, and Adam's count
    split_over_both = count - whole_over_tensor
    assert sum(found.values()) == 12 * split_over_both // 8 + 12 * whole_over_tensor // 4 + 4


def test_state_bytes_are_those_of_the_arrays_on_a_device():
    config = dataclasses.replace(MODELS["llama_kv2"][1], vocab_size=61)
    plan = jp.make_plan(jp.Layout(data=2, tensor=4, zero=1),
                        lambda key: llama.Model(config, rngs=nnx.Rngs(key)))  # fmt: skip
    state = plan.init(jax.random.key(0))
    on_device = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)]
    assert list(costs.state_bytes(plan).values()) == on_device


# Bytes sent


@pytest.mark.parametrize("op, wire", [("all-gather", 700), ("reduce-scatter", 700),
                                      ("all-to-all", 700), ("all-reduce", 1400)])  # fmt: skip
def test_a_ring_of_n_devices_sends_n_minus_1_parts(op, wire):
    assert Transfer("w", op, ("data",), count=5, bytes=160, devices=8).wire_bytes == wire


def parameter_bytes(name="llama", **settings):
    """op -> payload per step in units of the model's parameters."""
    layout = jp.Layout(**{"data": 8, **settings})
    model = model_shapes(name)
    found = {}
    for row in costs.parameter_traffic(model, layout):
        found[row.op] = found.get(row.op, 0) + row.total_bytes
    count = sum(leaf.size for leaf in jax.tree.leaves(model))
    return {op: total / count for op, total in found.items()}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero_stages_send_what_they_are_known_for(microbatches):
    m = microbatches
    assert parameter_bytes(zero=0, microbatches=m) == {"all-reduce": 4}
    assert parameter_bytes(zero=1, microbatches=m) == {"all-gather": 2, "reduce-scatter": 4}
    assert parameter_bytes(zero=2, microbatches=m) == {"all-gather": 2, "reduce-scatter": 4 * m}
    assert parameter_bytes(zero=1, microbatches=m, precision="fp32")["all-gather"] == 4


def test_zero_3_gathers_blocks_twice_and_the_outer_parameters_once_a_microbatch():
    model = model_shapes("llama")
    rows = costs.parameter_traffic(model, jp.Layout(data=8, zero=3, microbatches=4, remat="block"))
    gathers = {r.what: r.total_bytes for r in rows if r.op == "all-gather"}
    sizes = {r.what: r.total_bytes // (4 * 4) for r in rows if r.op == "reduce-scatter"}
    for path, size in sizes.items():
        assert gathers[path] == 4 * 2 * size * (2 if path.startswith("layers.") else 1), path


def test_zero_3_gathers_a_tied_table_for_both_its_uses():
    rows = costs.parameter_traffic(model_shapes("llama_tied"), jp.Layout(data=8, zero=3))
    (table,) = [r for r in rows if r.what == "embedding.table" and r.op == "all-gather"]
    assert table.count == 2


def test_zero_3_does_not_gather_again_what_the_backward_pass_does_not_read():
    rows = costs.parameter_traffic(model_shapes("gpt2"), jp.Layout(data=2, zero=3))
    counts = {r.what: r.count for r in rows if r.op == "all-gather"}
    assert counts["layers.mlp.down.weight"] == 2 * 4
    assert counts["layers.mlp.down.bias"] == 4 + 1  # the last block's come twice to the forward


def test_replicas_reduce_shards_and_what_stays_whole_is_all_reduced():
    layout = jp.Layout(replica=2, data=4, zero=1)
    rows = costs.parameter_traffic(model_shapes("gpt2"), layout)
    rows = {(r.what, r.op, r.axes): r for r in rows}
    table = 61 * 32 * 4
    assert rows["embedding.table", "reduce-scatter", ("data",)].bytes == table
    assert rows["embedding.table", "all-reduce", ("replica",)].bytes == table // 4
    model = model_shapes("llama", num_layers=1, embed_dim=6, ffn_dim=8)
    rows = {(r.what, r.op, r.axes) for r in costs.parameter_traffic(model, layout)}
    assert ("norm.scale", "all-reduce", ("replica", "data")) in rows
    assert not [r for r in rows if r[0] == "norm.scale" and r[1] == "all-gather"]


def test_a_padded_vocabulary_travels_by_all_to_all_at_its_padded_size():
    rows = costs.parameter_traffic(model_shapes("gpt2"), jp.Layout(tensor=4))
    exchange = [r for r in rows if r.op == "all-to-all"]
    assert [(r.what, r.bytes) for r in exchange] == [
        ("embedding.table", 64 * 32 // 4 * 2),  # bf16 there
        ("embedding.table", 64 * 32 // 4 * 4),  # fp32 back
    ]


def test_sequence_parallelism_sends_four_gathers_and_four_scatters_per_block_and_microbatch():
    layout = jp.Layout(data=2, tensor=4, microbatches=4)
    rows = costs.activation_traffic(model_shapes("llama"), layout, 32, 16)
    a = 4 * 16 * 32 * 2  # rows x tokens x embed x bf16
    blocks = [(r.op, r.count, r.bytes) for r in rows if r.what.startswith("blocks")]
    assert sorted(blocks) == [("all-gather", 32, a)] * 2 + [("reduce-scatter", 32, a)] * 2
    entropy = {r.what: r.bytes for r in rows if r.what.startswith("cross entropy")}
    assert entropy == {"cross entropy, maximum": 4 * 64, "cross entropy, sum and target": 8 * 64}


def test_without_sequence_parallelism_a_block_sends_four_all_reduces():
    layout = jp.Layout(tensor=4, sequence_parallel=False)
    rows = costs.activation_traffic(model_shapes("llama"), layout, 32, 16)
    blocks = [r for r in rows if r.what.startswith("blocks")]
    assert {r.op for r in blocks} == {"all-reduce"} and sum(r.count for r in blocks) == 4 * 4


def test_an_axis_without_a_formula_is_refused():
    with pytest.raises(ValueError, match="expert=2: .* has no formula here.*use expert=1"):
        costs.parameter_traffic(model_shapes("llama"), jp.Layout(expert=2))
