"""Real compiles for GPUs that are not here, and for emulated devices."""

import dataclasses
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar import costs
from jaxpar.cluster import hlo, stand_in
from jaxpar.cluster.compiler import compile
from jaxpar.cluster.target import Target
from jaxpar.costs_pipeline import branch_share
from jaxpar.loss import CHUNK
from jaxpar.models import llama

H100X8 = Target(gpu="h100", nodes=2, gpus_per_node=4)
CPUX8 = Target(gpu="cpu", nodes=2, gpus_per_node=4)
ROWS, SEQ_LEN = 16, 512
TX = optax.adamw(1e-3)
LAYOUTS = {
    "data": dict(data=4, tensor=2),
    "zero0": dict(data=8, zero=0, microbatches=2, remat="block"),
    "zero3": dict(data=4, tensor=2, zero=3, remat="block"),
    "pipe": dict(pipe=2, data=2, tensor=2, microbatches=4, remat="block"),
    "offload": dict(data=8, remat="offload"),
}


def make_plan(name, config=None, with_optimizer=True, **changes):
    def init(key):
        model = llama.Llama(config or llama.tiny(), rngs=nnx.Rngs(key))
        return (model, TX.init(model)) if with_optimizer else model

    layout = jp.Layout(**{**LAYOUTS[name], **changes})
    return jp.make_plan(layout, init, devices=jax.devices()[: layout.num_devices])


@functools.cache
def step(name, target=H100X8):
    return compile(make_plan(name), target, (ROWS, SEQ_LEN), tx=TX, clip_norm=1.0)


def asked(name, layout):
    """(op, axis) -> payload bytes of a step, by the formulas of the layout."""
    model = make_plan(name).state[0]
    rows = costs.parameter_traffic(model, layout)
    rows += costs.activation_traffic(model, layout, ROWS, SEQ_LEN)
    found = Counter()
    for row in rows:
        found[row.op, "+".join(row.axes)] += row.total_bytes
    return found


@pytest.mark.parametrize("name", ["data", "zero0", "zero3", "pipe"])
def test_what_a_step_sends_on_gpus_is_what_the_layout_asks_for_to_the_byte(name):
    report, layout = step(name), jp.Layout(**LAYOUTS[name])
    expected = asked(name, layout)
    found = {key: sums.total_bytes for key, sums in report.by_axis.items()}
    scalars = 0  # of the norms of gradients, which the formulas leave to the optimizer
    for key, total in found.items():
        more = total - expected.pop(key, 0)
        assert 0 <= more < 256, (key, more)
        scalars += more
    assert not +expected and (scalars > 0) == (layout.zero > 0 or layout.tensor > 1)


def test_a_plans_arguments_are_its_state_and_its_batch():
    plan, report = make_plan("zero3"), step("zero3")
    state = sum(costs.state_bytes(plan).values())
    batch = 3 * ROWS // 4 * SEQ_LEN * 4
    assert report.memory.arguments == state + batch
    assert report.memory.aliased == state


def test_the_peak_is_the_sum_of_its_parts_and_its_arrays_are_named():
    memory = step("zero3").memory
    parts = memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    assert memory.peak == parts and memory.device == 84_942_979_072
    assert any(array.name.startswith("jit(step)/") for array in memory.arrays)
    temporary = [array for array in memory.arrays if array.kind == "temporary"]
    assert temporary and all(array.bytes <= memory.temporaries for array in temporary)
    sizes = [array.bytes for array in memory.arrays]
    assert sizes == sorted(sizes, reverse=True)


def test_remat_offload_shows_as_memory_of_the_host():
    # the inputs of 4 blocks: 2 rows of 512 tokens, 64 numbers of bf16 each
    assert step("offload").memory.host >= 4 * 2 * 512 * 64 * 2
    assert step("data").memory.host == 0


@pytest.mark.parametrize("name", ["data", "zero3", "pipe"])
def test_operations_are_those_of_the_model_and_of_what_is_recomputed(name):
    layout, c = jp.Layout(**LAYOUTS[name]), llama.tiny()
    projections = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    matrix = c.embed_dim * c.ffn_dim  # of the three of an MLP
    scores = c.num_heads * c.head_dim * SEQ_LEN  # a query's, over all keys
    block = 3 * (projections + 3 * matrix) + 7 * scores
    if layout.remat == "block":  # again but for the last product
        block += projections + 2 * matrix + 2 * scores
    chunked = ROWS // layout.data // layout.microbatches * SEQ_LEN > CHUNK
    head = (4 if chunked else 3) * c.embed_dim * c.vocab_size  # chunks compute logits again
    assert step(name).flops == 2 * ROWS * SEQ_LEN * (c.num_layers * block + head) // 8


def test_groups_along_data_cross_nodes_and_those_along_tensor_do_not():
    links = {(row.axis, row.crosses_nodes) for row in step("data").collectives}
    assert ("tensor", False) in links and ("data", True) in links
    assert ("tensor", True) not in links


def test_a_good_layout_has_no_warning_and_a_useless_setting_has_one():
    for name in ("data", "pipe"):
        assert not [text for text in step(name).warnings if "cuDNN is not installed" not in text]
    report = compile(
        make_plan("data", data=1, tensor=4, zero=2), Target(gpus_per_node=4), (4, SEQ_LEN)
    )
    assert "zero=2 has no effect" in report.warnings[0]


def test_overlap_is_told_by_phase_of_the_pipeline():
    permutes = {o.phase for o in step("pipe").overlap if o.op == "collective-permute"}
    assert permutes == {"warm-up", "steady", "cool-down"}


def test_zero_0_hides_the_reduction_of_all_but_the_last_part_of_each_block():
    config = dataclasses.replace(llama.llama_1b(), num_layers=4)  # wide: XLA joins small ones
    report = compile(make_plan("zero0", config), H100X8, (ROWS, SEQ_LEN), tx=TX)
    inside = [o for o in report.overlap if o.op == "all-reduce" and o.count > 1]
    hidden = sum(o.count * o.bytes for o in inside if not o.exposed)
    assert hidden > 0.9 * sum(o.count * o.bytes for o in inside) > 0


def test_without_an_optimizer_the_gradients_are_compiled():
    plan = make_plan("data", with_optimizer=False)
    report = compile(plan, H100X8, (ROWS, SEQ_LEN), loss=llama.loss)
    gradients = sum(costs.state_bytes(plan).values())
    assert report.memory.outputs >= gradients and report.memory.aliased == 0
    assert report.memory.arguments < step("data").memory.arguments / 2
    assert (
        report.by_axis["reduce-scatter", "data"] == step("data").by_axis["reduce-scatter", "data"]
    )


def test_a_batch_may_be_given_as_arrays_with_documents():
    zeros = jnp.zeros((ROWS, SEQ_LEN), jnp.int32)
    batch = dict(tokens=zeros, targets=zeros, weights=zeros * 1.0, segment_ids=zeros)
    plan = make_plan("data", with_optimizer=False, precision="fp32")
    arguments = compile(plan, H100X8, batch).memory.arguments
    assert arguments == sum(costs.state_bytes(plan).values()) + 4 * ROWS // 4 * SEQ_LEN * 4


def test_without_cudnn_blocks_stand_in_with_the_same_operations_and_memory(monkeypatch):
    with_cudnn = step("data")
    attention = with_cudnn.flops_by.attention
    monkeypatch.setattr(stand_in, "has_cudnn", lambda: False)
    report = compile(make_plan("data"), H100X8, (ROWS, SEQ_LEN), tx=TX, clip_norm=1.0)
    (warning,) = report.warnings
    assert "cuDNN is not installed" in warning and "differs by at most" in warning
    assert report.flops_by.attention == 0
    if attention:  # cuDNN is here to compare with
        assert report.flops == with_cudnn.flops
        more = stand_in.bytes_more(jp.Layout(**LAYOUTS["data"]), llama.tiny(), (ROWS, SEQ_LEN))
        assert abs(report.memory.peak - with_cudnn.memory.peak) <= more
    assert report.by_axis == with_cudnn.by_axis


def test_a_head_that_jax_gives_cudnn_only_on_a_gpu_is_compiled_in_blocks(monkeypatch):
    monkeypatch.setattr(stand_in, "has_cudnn", lambda: True)
    config = llama.preset("tiny", head_dim=256, num_heads=2, num_kv_heads=2, num_layers=1)
    plan = make_plan("data", config, with_optimizer=False)
    assert "head_dim 256" in compile(plan, H100X8, (ROWS, SEQ_LEN)).warnings[0]
    assert stand_in.reason(jp.Layout(precision="fp32"), plan.state) == ""


def test_options_reach_xla_and_a_misspelt_preset_is_refused():
    options = {"xla_gpu_enable_latency_hiding_scheduler": False}
    plain = compile(
        make_plan("data"), H100X8, (ROWS, SEQ_LEN), tx=TX, clip_norm=1.0, options=options
    )
    assert plain.by_axis.keys() == step("data").by_axis.keys()
    hidden = [sum(not o.exposed for o in report.overlap) for report in (plain, step("data"))]
    assert hidden[0] < hidden[1]
    with pytest.raises(ValueError, match="no preset 'overlp'; did you mean 'overlap'"):
        compile(make_plan("data"), H100X8, (ROWS, SEQ_LEN), options="overlp")


def test_emulated_devices_send_the_same_and_have_no_memory_to_fit():
    report, gpu = step("zero3", CPUX8), step("zero3")
    assert report.fits is None and report.memory.device is None
    assert report.memory.arguments == gpu.memory.arguments
    assert set(report.by_axis) == set(gpu.by_axis)
    widened = report.by_axis["all-gather", "data"], gpu.by_axis["all-gather", "data"]
    assert widened[0].total_bytes == 2 * widened[1].total_bytes  # XLA:CPU sends bf16 as f32
    assert any("where bf16 was asked" in text for text in report.warnings)


WRONG = {
    "no batch": (lambda: compile(make_plan("data"), H100X8), "one batch, found 0 arguments"),
    "a batch that does not divide": (
        lambda: compile(make_plan("data"), H100X8, (7, SEQ_LEN)),
        "global_batch 7 is not a multiple of data 4; use 4 or 8",
    ),
    "a layout of another size": (
        lambda: compile(make_plan("data"), Target(nodes=2), (ROWS, SEQ_LEN)),
        "16 x h100-80gb in 2 nodes of 8: data=4 x tensor=2 = 8 devices, found 16",
    ),
    "tensor groups on several nodes": (
        lambda: compile(make_plan("data"), Target(nodes=8, gpus_per_node=1), (ROWS, SEQ_LEN)),
        "tensor=2 puts one group of devices on several hosts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence_before_anything_compiles(name):
    call, words = WRONG[name]
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_sizes_of_a_mesh_are_in_the_report():
    report = step("pipe")
    assert math.prod(report.mesh_axes.values()) == 8 and report.mesh_axes["pipe"] == 2
    assert "pipe=2 data=2 tensor=2" in report.title and "16 rows of 512 tokens" in report.title
    assert report.compile_seconds > 0 and report.trace_seconds > 0
    assert "HloModule" in report.text


@pytest.mark.parametrize("name", ["data", "zero3", "pipe"])
def test_emulated_devices_send_what_gpus_send_but_for_types_that_xla_widened(name):
    model, layout = make_plan(name).state[0], jp.Layout(**LAYOUTS[name])
    share = branch_share(layout, model) if layout.pipe > 1 else 1.0

    def asked(target):
        sums = Counter()
        report = step(name, target)
        for c in hlo.collectives(report.text, report.mesh_axes, branch_share=share):
            sums[c.op, c.axes] += c.count * c.asked_bytes
        return {key: float(size) for key, size in sums.items()}

    gpu, cpu = asked(H100X8), asked(CPUX8)
    for key in {*gpu, *cpu}:  # XLA joins numbers of norms and losses differently
        assert abs(gpu.get(key, 0) - cpu.get(key, 0)) < 256, key
    assert max(gpu.values()) > 2**20
