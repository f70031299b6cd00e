"""Effects, not flags: what ZeRO, accumulation and remat do is read from the compiled program."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import optax
import pytest
from flax import nnx

import jaxpar as jp
from compiled import MODELS, batch_shapes, compiled, model_shapes, trace
from jaxpar import costs
from jaxpar.models import llama

FEW, MANY = 4, 16
ROWS, SEQ_LEN = 8, 8
D, F, N, H = 64, 256, 4, 16  # of the model "wide", with as many kv heads as heads
BLOCK_MATRICES = 4 * D * D + 3 * D * F
BLOCK_BYTES = 4 * (BLOCK_MATRICES + 2 * D)
INPUT_BYTES = SEQ_LEN * D * 4  # of a block, one row per device


def layout_of(**settings):
    return jp.Layout(**{"data": 8, "precision": "fp32", **settings})


def wide(num_layers, rows=ROWS, **settings):
    return compiled("wide", layout_of(**settings), rows, SEQ_LEN, num_layers=num_layers)


def temp(*args, **settings) -> int:
    return wide(*args, **settings).memory.temp_size_in_bytes


# ZeRO


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_zero_1_gathers_and_scatters_every_parameter_once_a_step(microbatches):
    run = compiled("llama", layout_of(zero=1, microbatches=microbatches))
    arrays = len(run.plan.splits)
    assert arrays == 12 and all(s.zero_axes == ("data",) for s in run.plan.splits)
    executions = Counter()
    for c in run.collectives:
        executions[c.op] += c.count * len(c.buffers)
    # the all-reduces are the loss and the count of tokens
    assert executions == {"all-gather": arrays, "reduce-scatter": arrays, "all-reduce": 2}


@pytest.mark.parametrize("zero, reductions", [(1, 1), (2, 4), (3, 4)])
def test_gradients_are_reduced_as_often_as_the_stage_says(zero, reductions):
    run = compiled("llama", layout_of(zero=zero, microbatches=4))
    once = sum(4 * leaf.size for leaf in jax.tree.leaves(run.plan.state))
    payload = sum(c.total_bytes for c in run.collectives if c.op == "reduce-scatter")
    assert payload == reductions * once


def test_zero_3_memory_grows_by_the_kept_block_inputs_alone():
    few, many = temp(FEW, zero=3, remat="block"), temp(MANY, zero=3, remat="block")
    assert many - few == (MANY - FEW) * INPUT_BYTES


@pytest.mark.parametrize("num_layers", [FEW, MANY])
def test_zero_3_never_holds_more_than_two_blocks_of_weights_and_one_of_gradients(num_layers):
    assert temp(num_layers, zero=3, remat="block") - num_layers * INPUT_BYTES < 3 * BLOCK_BYTES
    assert temp(FEW, zero=1, remat="block") > FEW * BLOCK_BYTES  # which gathers all at once


def test_zero_3_gathers_blocks_inside_the_loops_and_never_a_whole_stack():
    stack = f"f32[{MANY},{D},{F}]"  # the gate's weights of all layers
    assert stack in wide(MANY, zero=1, remat="block").text
    run = wide(MANY, zero=3, remat="block")
    assert stack not in run.text
    outer = {4 * D, 4 * MODELS["wide"][1].vocab_size * D}  # final norm; embedding and head
    block = {4 * D * D, 4 * D * F, 4 * D}  # the first block's come before the loop
    gathers = [c for c in run.collectives if c.op == "all-gather"]
    assert {c.count for c in gathers if "while" in c.op_name} == {MANY, MANY - 1}
    for c in gathers:
        assert "while" in c.op_name or (c.count == 1 and c.bytes in outer | block), c


def test_optimizer_bytes_per_device_fall_as_one_over_data():
    module, config = MODELS["llama"]
    tx = optax.adam(1e-3)

    def init(key):
        model = module.Model(config, rngs=nnx.Rngs(key))
        return model, tx.init(model)

    for data in (2, 4, 8):
        plan = jp.make_plan(layout_of(data=data, zero=1), init, devices=jax.devices()[:data])
        parameters = sum(leaf.size for leaf in jax.tree.leaves(plan.state[0]))
        stored = 4 * 3 * parameters // data + 4  # parameters, two moments; Adam's count
        assert sum(costs.state_bytes(plan).values()) == stored
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                         plan.state, plan.shardings)  # fmt: skip
    step = plan.train_step(tx).lower(state, batch_shapes(plan, ROWS, SEQ_LEN))
    memory = step.compile().memory_analysis()
    assert memory.argument_size_in_bytes == stored + 3 * 4 * ROWS * SEQ_LEN // data
    assert memory.alias_size_in_bytes == stored  # the state is updated in place


# Accumulation


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_four_times_more_microbatches_add_at_most_a_copy_of_their_tokens(zero):
    few = wide(FEW, rows=4 * ROWS, zero=zero, microbatches=4).memory
    many = wide(FEW, rows=16 * ROWS, zero=zero, microbatches=16).memory
    tokens = many.argument_size_in_bytes - few.argument_size_in_bytes
    assert tokens == 12 * SEQ_LEN * 4 * 3
    grown = many.temp_size_in_bytes - few.temp_size_in_bytes
    assert grown in (0, tokens, tokens + 64)  # or a copy of them; XLA aligns arrays to 64 bytes


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_accumulation_adds_at_most_one_sharded_gradient(zero):
    once = wide(FEW, zero=zero).memory
    several = wide(FEW, rows=4 * ROWS, zero=zero, microbatches=4).memory
    sharded = sum(4 * leaf.size for leaf in jax.tree.leaves(model_shapes("wide"))) // 8
    assert several.temp_size_in_bytes - once.temp_size_in_bytes <= sharded


def test_one_microbatch_adds_no_loop_and_no_buffer():
    once = wide(FEW, zero=2)
    several = wide(FEW, rows=4 * ROWS, zero=2, microbatches=4)
    loops = [len(re.findall(r" while\(", run.text)) for run in (once, several)]
    assert loops == [2, 3]  # blocks forward, blocks backward; and the microbatches
    assert once.memory.temp_size_in_bytes <= several.memory.temp_size_in_bytes


# Remat


def forward_flops_of_blocks(num_layers, down=True) -> int:
    matrices = BLOCK_MATRICES - (0 if down else D * F)
    return num_layers * (2 * matrices * SEQ_LEN + 4 * SEQ_LEN**2 * N * H)


def flops_above_the_models(num_layers, remat) -> int:
    model = costs.model_flops(model_shapes("wide", num_layers=num_layers), SEQ_LEN, causal=False)
    return wide(num_layers, zero=3, remat=remat).flops - model.total


def test_without_remat_nothing_is_computed_twice():
    assert flops_above_the_models(FEW, "none") == 0


def test_remat_dots_computes_the_products_inside_attention_again_and_no_other():
    assert flops_above_the_models(FEW, "dots") == FEW * 4 * SEQ_LEN**2 * N * H


@pytest.mark.parametrize("remat", ["block", "offload"])
def test_remat_block_runs_each_block_forward_once_more_but_for_its_last_product(remat):
    assert flops_above_the_models(FEW, remat) == forward_flops_of_blocks(FEW, down=False)


def test_each_remat_keeps_what_it_names():
    def grows_by(remat, from_layers=MANY // 2):
        few, many = temp(from_layers, zero=3, remat=remat), temp(MANY, zero=3, remat=remat)
        return (many - few) / (MANY - from_layers)

    assert grows_by("block", from_layers=FEW) == INPUT_BYTES
    # the block's input; query, key, value and out; gate and up (nothing reads down's result)
    assert grows_by("dots") == SEQ_LEN * 4 * (D + 4 * D + 2 * F)
    # norms and gates keep their arguments alone, so what is left is less than as much again
    assert grows_by("dots") < grows_by("none") < 2 * grows_by("dots")


def test_offload_moves_the_kept_inputs_of_blocks_and_nothing_else_to_the_host():
    """On CPU host memory is device memory, so this reads the program before XLA, for a GPU."""
    _, traced = trace("wide", layout_of(remat="offload"), ROWS, SEQ_LEN)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    moves = re.findall(r'placement = "(\w+)".*-> tensor<(.*)>', text)
    block_input = f"1x{SEQ_LEN}x{D}xf32"
    assert [shape for place, shape in moves if place == "pinned_host"] == [block_input]
    assert moves.count(("device", block_input)) == 1  # and back
    _, traced = trace("wide", layout_of(remat="block"), ROWS, SEQ_LEN)
    assert "pinned_host" not in traced.lower(lowering_platforms=("cuda",)).as_text()


# Size of programs


def test_the_program_is_as_long_for_64_layers_as_for_4():
    few, many = wide(FEW, zero=3, remat="block"), wide(64, zero=3, remat="block")
    assert len(many.text.splitlines()) < 1.2 * len(few.text.splitlines())


LOWER = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import conftest
from compiled import trace
import jaxpar as jp
layout = jp.Layout(data=2, tensor=4, zero=3, microbatches=4, remat="block")
print(hashlib.sha256(trace("llama_tied", layout)[1].lower().as_text().encode()).hexdigest())
"""


def test_two_processes_lower_the_same_program():
    tests = str(Path(__file__).parent)
    runs = [
        subprocess.Popen([sys.executable, "-c", LOWER.format(tests=tests)], text=True,
                         stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]  # fmt: skip
    hashes = [run.communicate(timeout=120)[0].strip() for run in runs]
    assert len(hashes[0]) == hashlib.sha256().digest_size * 2
    assert hashes[0] == hashes[1]


@pytest.mark.full
def test_the_step_benchmark_measures_what_the_compiled_step_has(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import step

    step.main(("zero3",), global_batch=8, seq_len=16, steps=1, json=True)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["settings"] == {"data": 8, "zero": 3, "precision": "fp32"}
    assert row["ratio"] == row["step_seconds"] / row["one_device_seconds"] > 0
    model = llama.Model(llama.tiny(), rngs=nnx.Rngs(0))
    gathered = sum(r.total_bytes for r in costs.parameter_traffic(model, layout_of(zero=3))
                   if r.op == "all-gather")  # fmt: skip
    assert [c["payload_bytes"] for c in row["collectives"] if c["op"] == "all-gather"] == [gathered]
    state = 3 * 4 * sum(leaf.size for leaf in jax.tree.leaves(model)) // 8 + 4
    assert row["argument_bytes"] == state + 3 * 4 * 8 * 16 // 8
    assert row["temp_bytes"] > 0 and row["hlo_lines"] > 1000 and row["compile_seconds"] > 0


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_zero_0_reduces_block_by_block_once_a_step(microbatches):
    run = compiled("llama", layout_of(zero=0, microbatches=microbatches))
    layers, arrays = run.plan.state.config.num_layers, len(run.plan.splits)
    outer = 3  # embedding, head, final norm
    reduced = Counter()
    for c in run.collectives:
        reduced[c.op] += c.count * len(c.buffers)
    # and two numbers: the loss and the count of tokens
    assert reduced == {"all-reduce": outer + (arrays - outer) * layers + 2}
    payload = sum(c.total_bytes for c in run.collectives)
    assert payload == sum(4 * leaf.size for leaf in jax.tree.leaves(run.plan.state)) + 2 * 4
