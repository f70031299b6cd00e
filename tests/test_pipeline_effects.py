"""Pipelines as compiled: memory, messages, reductions, bubbles and size, read from the program."""

import re
from collections import Counter

import pytest

import jaxpar as jp
from compiled import compiled, model_shapes
from jaxpar import costs, costs_pipeline
from jaxpar.cluster import hlo
from jaxpar.placement import pipeline_table

ROWS, SEQ_LEN, LAYERS = 2, 32, 8  # rows of a microbatch on a device
D, F = 64, 256  # of the model "wide"
ACTIVATION = ROWS * SEQ_LEN * D * 4
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]


def wide(microbatches, num_layers=LAYERS, **settings):
    layout = jp.Layout(microbatches=microbatches, **{"precision": "fp32", "pipe": 4, **settings})
    rows = microbatches * ROWS * layout.data * layout.replica
    return compiled("wide", layout, rows, SEQ_LEN, num_layers=num_layers)


def executed(run):
    """(collectives, operations) with branches counted as often as they are taken."""
    model = model_shapes("wide", num_layers=LAYERS)
    share = costs_pipeline.branch_share(run.plan.layout, model)
    sizes = run.plan.layout.axis_sizes
    found = hlo.flops(run.text, branch_share=share)
    assert not found.unread and not found.unknown_loops
    return hlo.collectives(run.text, sizes, branch_share=share), found.total


def conditionals(run) -> Counter:
    """Phase -> conditionals in the program."""
    found = Counter()
    for visit in hlo.walk(hlo.parse(run.text)):
        if visit.instruction.opcode == "conditional":
            name = visit.instruction.attributes["metadata"]
            found[re.search(r"/(embed_back|embed|head|F|B)/", name)[1]] += 1
    return found


# Memory


@pytest.mark.parametrize("remat", ["stage", "block", "dots", "none"])
@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.full)])
def test_memory_of_1f1b_does_not_grow_with_the_microbatches(remat, data):
    few, many = (wide(m, remat=remat, data=data).memory for m in (8, 32))
    # the batch itself grows; it is an argument: tokens, targets and weights of 4 bytes each
    tokens = 3 * 4 * 24 * ROWS * SEQ_LEN
    assert many.argument_size_in_bytes - few.argument_size_in_bytes == tokens
    assert abs(many.temp_size_in_bytes - few.temp_size_in_bytes) <= 0.02 * few.temp_size_in_bytes


def test_memory_of_gpipe_grows_with_the_microbatches_by_what_is_kept():
    few, many = (wide(m, remat="block", schedule="gpipe").memory for m in (8, 32))
    kept = 24 * LAYERS // 4 * ACTIVATION  # the inputs of a stage's blocks
    grown = many.temp_size_in_bytes - few.temp_size_in_bytes
    assert kept <= grown < 3.1 * kept  # and the stages' inputs, and the loss's gradients


def test_weight_gradients_are_stacked_neither_per_microbatch_nor_per_stage():
    run = wide(8, remat="block", data=2)
    leading = {m[1] for m in re.finditer(rf"f32\[([\d,]*){D},{F}\]", run.text)}
    assert leading == {"", "1,", f"{LAYERS // 4},"}  # one block's, and the stage's


# Messages


@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 8])
def test_permutations_and_their_bytes_are_the_messages_of_the_table(schedule, chunks, microbatches):
    run = wide(microbatches, schedule=schedule, chunks=chunks, remat="block")
    table = pipeline_table(run.plan.layout)
    sent = [c for c in run.collectives if c.op == "collective-permute"]
    exchanges = table.exchanges("F") + table.exchanges("B")
    assert sum(c.count for c in sent) == exchanges > 0
    assert sum(c.total_bytes for c in sent) == exchanges * ACTIVATION
    assert all(c.axes == ("pipe",) and not c.in_conditional for c in sent)
    moved = sum(c.count * len(c.groups) for c in sent)  # pairs of stages, also where one is idle
    assert moved >= table.messages("F") + table.messages("B")


def test_no_activation_is_gathered_or_exchanged_among_all():
    for data in (1, 2):
        run = wide(8, remat="block", data=data)
        gathers = [c for c in run.collectives if c.op in ("all-gather", "all-to-all")]
        model = model_shapes("wide", num_layers=LAYERS)
        weights = sum(r.count for r in costs.parameter_traffic(model, run.plan.layout)
                      if r.op == "all-gather")  # fmt: skip
        assert sum(c.count * len(c.buffers) for c in gathers) == weights
        assert all(c.op == "all-gather" and c.axes == ("data",) for c in gathers)


# Reductions


@pytest.mark.parametrize("microbatches", [2, 8])
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_reduced_once_a_step_and_outside_the_loops(zero, microbatches):
    run = wide(microbatches, pipe=2, data=4, zero=zero)
    reduces = [c for c in run.collectives if "data" in c.axes and c.op != "all-gather"]
    for c in reduces:
        assert c.count == 1 and not c.in_conditional and "while" not in c.op_name, c
    arrays = len(run.plan.splits)
    found = Counter()
    for c in reduces:
        found[c.op] += len(c.buffers)
    # the loss and the count of tokens are all-reduced
    want = {"all-reduce": arrays + 2} if zero == 0 else {"reduce-scatter": arrays, "all-reduce": 2}
    assert found == want


def test_zero_3_gathers_one_block_at_a_time_and_never_a_stage():
    run = wide(8, pipe=2, data=4, zero=3, remat="block")
    one = max(4 * D * F, 4 * 64 * D // 2)  # a matrix of one block; this stage's half of the table
    gathers = [c for c in run.collectives if c.op == "all-gather"]
    assert gathers and all(b.bytes <= one for c in gathers for b in c.buffers)
    assert f"f32[{LAYERS // 2},{D},{F}]" not in run.text and f"f32[{LAYERS},{D},{F}" not in run.text
    assert f"f32[{LAYERS // 2},{D},{F}]" in wide(8, pipe=2, data=4, zero=1, remat="block").text


# Bubbles


@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
def test_nothing_is_computed_in_bubbles(schedule, chunks):
    """The operations of four stages add up to those of one device: no bubble, no head twice."""
    one = wide(8, pipe=1)
    run = wide(8, schedule=schedule, chunks=chunks)
    assert {"F", "B"} <= conditionals(run).keys()
    assert 4 * executed(run)[1] == one.flops


def test_idle_compute_has_no_branch_around_stages_and_works_in_every_tick():
    skip, run = wide(8), wide(8, idle="compute")
    assert not {"F", "B"} & conditionals(run).keys()
    # 8 microbatches on 4 stages: 11 ticks of each kind instead of 8; the head's work stays
    head = 8 * 6 * ROWS * SEQ_LEN * D * 64 // 4
    head += 8 * 2 * ROWS * SEQ_LEN * D * 64 // 4  # its logits are computed again
    per_tick = (executed(skip)[1] - head) / 8
    assert executed(run)[1] - head == pytest.approx(float(11 * per_tick), rel=1e-3)


# Size of programs


def lines(run) -> int:
    return len(run.text.splitlines())


def test_the_program_is_as_long_for_64_microbatches_as_for_8():
    many, few = wide(64, remat="block"), wide(8, remat="block")
    written = [len(run.lowered.as_text().splitlines()) for run in (many, few)]
    assert written[0] == written[1]
    assert lines(many) < 1.05 * lines(few)  # XLA fuses loops of other lengths differently


def test_the_program_is_as_long_for_64_layers_as_for_8():
    many = wide(8, num_layers=64, remat="block")
    assert lines(many) < 1.05 * lines(wide(8, remat="block"))
