"""Schedules and their tables, over the whole grid of sizes, against formulas and an interpreter."""

import itertools

import numpy as np
import pytest

from jaxpar.pipeline.schedules import (
    SCHEDULES,
    B,
    F,
    W,
    get_schedule,
    gpipe,
    orders,
    rounds,
)
from jaxpar.pipeline.table import lower
from jaxpar.pipeline.timing import Costs, bubble, makespan, makespan_async
from schedule_orders import SIZES, grid, megatron_1f1b, megatron_interleaved, with_w, zb_h1

COSTS = Costs(F=1, B=1, W=1)
# ---- formulas ----


@pytest.mark.parametrize("name", SCHEDULES)
def test_makespan_bubble_and_live_counts_equal_the_published_formulas(name):
    for table in grid(name):
        p, m, c = table.stages, table.microbatches, table.chunks
        for costs in (COSTS, Costs(F=1.5, B=1, W=0.25)):
            whole = costs.F + costs.B + costs.W
            steps = c * max(m, p) + min(m, p) - 1
            assert makespan(table, costs) == pytest.approx(steps / c * whole, rel=1e-12)
            assert bubble(table, costs) == pytest.approx(1 - c * m / steps, abs=1e-12)
            if m >= p or c == 1:  # the published form
                assert bubble(table, costs) == pytest.approx((p - 1) / (c * m + p - 1), abs=1e-12)
        assert list(table.live) == live_formula(name, p, m, c)
        ideal = makespan_async(table, COSTS)
        assert ideal <= makespan(table, COSTS) * (1 + 1e-12)
        if m % p == 0 or c == 1:
            assert ideal == pytest.approx(makespan(table, COSTS), rel=1e-12)


def live_formula(name, p, m, c):
    """Per stage: GPipe keeps all; the others one more than the warm-up of eager 1F1B, 2(p-s)-1 on
    stage s (2p-1 on rank 0), and of Megatron's interleaving, 2(p-s-1) + (c-1)p, for m % p == 0."""
    if name == "gpipe":
        return [c * m] * p
    largest = p if m % p == 0 else max(rounds(m, p))
    return [min(c * m, 2 * (p - s) - 1 + (c - 1) * largest) for s in range(p)]


def prefix_peak(schedule, stages, microbatches, chunks):
    """The peak of (forwards listed - backwards listed), read off the orders alone."""
    listed = orders(schedule, stages, microbatches, chunks)
    steps = [np.cumsum([1 if task.kind == "F" else -1 for task in order]) for order in listed]
    return [int(step.max()) for step in steps]


@pytest.mark.parametrize("schedule", [*SCHEDULES, megatron_1f1b])
def test_live_is_a_property_of_the_order_alone(schedule):
    for stages, microbatches in [(1, 1), (3, 2), (4, 8), (6, 13)]:
        table = lower(schedule, stages, microbatches)
        assert list(table.live) == prefix_peak(schedule, stages, microbatches, 1)


def test_1f1b_has_the_ticks_of_the_ideal_lockstep_program():
    for p, m in itertools.product(range(1, 9), range(1, 25)):
        table = lower("1f1b", p, m)
        work = [
            "".join(k for k in "FB" if any(task.kind == k for row in rows for task in row))
            for rows in table.ticks
        ]
        assert work == ["F"] * (p - 1) + ["FB"] * m + ["B"] * (p - 1)


def test_1f1b_keeps_no_more_with_more_microbatches():
    assert lower("1f1b", 4, 8).slots == lower("1f1b", 4, 200).slots == (7, 5, 3, 1)


def test_interleaved_is_megatrons_order_where_microbatches_divide_and_1f1b_with_one_chunk():
    for p, m, c in SIZES:
        if m % p == 0:
            assert orders("interleaved", p, m, c) == orders(megatron_interleaved, p, m, c)
        if c == 1:
            assert orders("interleaved", p, m) == orders("1f1b", p, m)


@pytest.mark.parametrize(
    ("schedule", "chunks", "idle", "peak"),
    [
        ("gpipe", 1, 9, 8),
        (megatron_1f1b, 1, 9, 4),
        (megatron_interleaved, 2, 4.5, 5.5),
        (megatron_interleaved, 4, 2.25, 4.75),
        ("gpipe", 2, 4.5, 8),
        (zb_h1, 1, 3, 4),
    ],
)
def test_asynchronous_makespan_and_peak_equal_the_event_simulation(schedule, chunks, idle, peak):
    table = lower(schedule, 4, 8, chunks)
    assert makespan_async(table, COSTS) - 8 * 3 == pytest.approx(idle)
    assert max(table.live) / chunks == peak == table.live[0] / chunks


def test_megatrons_order_keeps_min_m_and_p_minus_r_and_is_slower_in_lockstep():
    for p, m in itertools.product(range(1, 9), range(1, 25)):
        table = lower(megatron_1f1b, p, m)
        assert table.live == tuple(min(m, p - s) for s in range(p))
        assert makespan_async(table) == pytest.approx((m + p - 1) * 3)
        assert makespan(table) >= makespan(lower("1f1b", p, m))


def test_sends_cost_one_per_exchanging_tick_and_delay_the_asynchronous_runtime():
    table = lower("1f1b", 4, 8)  # sends: F in ticks 0..9, B in ticks 3..12
    assert makespan(table, Costs(send=0.5)) == 33 + 13 * 0.5
    chain = lower("gpipe", 3, 1)  # F F FB B B: four messages one after the other
    assert makespan_async(chain, Costs(send=0.5)) == 3 * 3 + 4 * 0.5


def test_a_split_backward_costs_b_and_w_apart():
    costs = Costs(F=1, B=2, W=4)
    split, whole = lower(with_w, 3, 7), lower("1f1b", 3, 7)
    assert split.splits_backward and not whole.splits_backward
    assert makespan(split, costs) == makespan(whole, costs) == (7 + 2) * 7
    assert split.slots_cut == (1, 1, 1) and whole.slots_cut == (0, 0, 0)


# ---- refusals ----


def listing(*per_stage):
    return lambda stage, stages, microbatches, chunks: per_stage[stage]


@pytest.mark.parametrize(
    ("per_stage", "says"),
    [
        ([[F(0), F(1), B(0)]], "stage 0 lacks B1"),
        ([[F(0), F(1), B(0), B(1), B(1)]], "lists B1 more than once"),
        ([[F(0), F(1), B(0), B(1), F(2)]], "lists F2 which does not exist"),
        ([[F(0), B(1), F(1), B(0)]], "stage 0: B1 comes before F1, whose result it needs"),
        ([[F(0), F(1), B(0), B(1), W(0)]], "lacks W1"),
        ([["F0", F(1), B(0), B(1)]], "'F0' is no task"),
        (
            [[F(0), B(0), F(1), B(1)], [F(1), B(1), F(0), B(0)]],
            "stage 0 is stuck at B0: it waits for B0 of stage 1, which lists F1 before it and is "
            "stuck at F1: it waits for F1 of stage 0, which lists B0 before it",
        ),
    ],
)
def test_a_wrong_order_is_refused_with_the_task_and_the_reason(per_stage, says):
    with pytest.raises(ValueError) as refusal:
        lower(listing(*per_stage), len(per_stage), 2)
    assert says in str(refusal.value)


def test_a_deadlock_of_three_stages_is_followed_around_its_circle():
    order = [[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)], [F(0), F(1), B(0), B(1)]]
    with pytest.raises(ValueError) as refusal:
        lower(listing(*order), 3, 2)
    assert str(refusal.value).endswith(
        "stage 0 is stuck at B0: it waits for B0 of stage 1, which lists F1 before it and is stuck "
        "at F1: it waits for F1 of stage 0, which lists B0 before it; list one of the awaited "
        "tasks earlier"
    )


def test_unknown_names_and_impossible_sizes_are_refused_with_what_works():
    with pytest.raises(ValueError, match='"interleave" is not known; did you mean "interleaved"'):
        get_schedule("interleave")
    with pytest.raises(ValueError, match='use schedule="interleaved" with chunks=2, or chunks=1'):
        lower("1f1b", 4, 8, 2)
    for sizes, name in (((0, 1, 1), "stages"), ((1, 0, 1), "microbatches"), ((1, 1, 0), "chunks")):
        with pytest.raises(ValueError, match=f"{name}=0: a schedule needs an integer >= 1"):
            lower("gpipe", *sizes)


def test_a_placement_that_is_no_permutation_is_refused():
    def same(stage, stages, microbatches, chunks):
        return gpipe(stage, stages, microbatches, chunks)

    same.placement = lambda stage, chunk, stages, chunks: chunk
    with pytest.raises(ValueError, match="each of 0..1 must appear exactly once"):
        lower(same, 2, 2)


@pytest.mark.parametrize("costs", [{"F": -1}, {"send": float("nan")}, {"F": 0, "B": 0, "W": 0}])
def test_costs_that_are_no_times_are_refused(costs):
    with pytest.raises(ValueError, match="use F=1" if "send" not in costs else "use send=1"):
        Costs(**costs)
