"""Tables: an interpreter follows every value through its slots; runs, colouring, directions."""

import itertools

import numpy as np
import pytest

from jaxpar.pipeline.schedules import SCHEDULES
from jaxpar.pipeline.slots import FAMILIES, colour
from jaxpar.pipeline.table import lower, runs
from schedule_orders import CUSTOM, grid, v_gpipe

# ---- an interpreter: buffers hold the names of values, every read must find the right one ----


def interpret(table):
    """Runs the arrays of a table and returns the most slots in use at one time, per family."""
    stages, last, split = table.stages, table.parts.size - 1, table.splits_backward
    held = {family: [{} for _ in range(stages)] for family in FAMILIES}
    peak = {family: [0] * stages for family in FAMILIES}
    parts = table.parts.tolist()
    work = {
        kind: lists(arrays) for kind, arrays in (("F", table.f), ("B", table.b), ("W", table.w))
    }
    wires = [(w, w.sends.tolist(), w.slots.tolist(), w.stage_slots.tolist()) for w in table.wires]

    def put(family, s, slot, value):
        buffer = held[family][s]
        assert slot >= 0 and slot not in buffer, "a slot is overwritten while in use"
        buffer[slot] = value
        peak[family][s] = max(peak[family][s], len(buffer))

    def take(family, s, slot, value, last_use=True):
        assert held[family][s][slot] == value, "a slot holds another value than the one needed"
        if last_use:
            del held[family][s][slot]

    def run(kind, s, me, slot):
        if kind == "F":
            if me[0] > 0:
                take("input", s, slot("input"), me)
                take("stage", s, slot("stage"), me, last_use=False)
            else:
                put("stage", s, slot("stage"), me)
            put("kept", s, slot("kept"), me)
        elif kind == "B":
            if me[0] < last:
                take("grad", s, slot("grad"), me)
            take("kept", s, slot("kept"), me, last_use=not split)
            take("stage", s, slot("stage"), me, last_use=not split)
            if split:
                put("cut", s, slot("cut"), me)
        else:
            for family in ("kept", "stage", "cut"):
                take(family, s, slot(family), me)

    for t in range(len(table.ticks)):
        made = {}
        for s, (kind, arrays) in itertools.product(range(stages), work.items()):
            m = arrays["microbatch"][t][s]
            if m >= 0:
                made[kind, s] = me = (parts[s][arrays["chunk"][t][s]], m)
                run(kind, s, me, lambda family, a=arrays, t=t, s=s: a[family][t][s])
        moved = 0
        for wire, sends, slots, stage_slots in wires:
            for s in range(stages):
                if sends[t][s]:
                    to, (v, m) = (s + wire.shift) % stages, made[wire.kind, s]
                    value = (v + 1, m) if wire.kind == "F" else (v - 1, m)
                    put("input" if wire.kind == "F" else "grad", to, slots[t][to], value)
                    if wire.kind == "F":
                        put("stage", to, stage_slots[t][to], value)
                    moved += 1
        ends = {"F": last, "B": 0}
        assert moved == sum(k in ends and v != ends[k] for (k, _), (v, _) in made.items())
    assert not any(any(buffers) for buffers in held.values()), "a value was never used"
    return peak


def lists(arrays):
    return {name: array.tolist() for name, array in vars(arrays).items()}


def check(table):
    for s, order in enumerate(table.orders):
        assert tuple(task for rows in table.ticks for task in rows[s]) == order
    for rows in table.ticks:
        for row in rows:
            kinds = "".join(task.kind for task in row)
            assert kinds in ("", "F", "B", "W", "FB", "FW", "BW", "FBW")
    for work in (table.f, table.b, table.w):
        idle = work.microbatch < 0
        assert all((array[idle] == -1).all() for array in vars(work).values())
    first, last = 0, table.parts.size - 1
    for work, slots, end in ((table.f, table.f.input, first), (table.b, table.b.grad, last)):
        tick, stage = np.nonzero(work.microbatch >= 0)
        part = table.parts[stage, work.chunk[tick, stage]]
        assert ((slots[tick, stage] < 0) == (part == end)).all()
    for wire in table.wires:
        assert (wire.sends.sum(axis=1) == (wire.slots >= 0).sum(axis=1)).all()
        assert (wire.used == wire.sends.any(axis=1)).all()
    for family, peak in interpret(table).items():
        assert getattr(table, f"slots_{family}") == tuple(peak), f"{family}: slots are wasted"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_runs_each_task_once_with_its_inputs_and_the_fewest_slots(name):
    for table in grid(name):
        count = table.microbatches * table.chunks
        for order in table.orders:
            assert len(order) == len(set(order)) == 2 * count
        check(table)
        assert table.messages("F") == table.messages("B")
        crossing = table.parts.size - 1 if table.stages > 1 else 0
        assert table.messages("F") == table.microbatches * crossing


@pytest.mark.parametrize(("schedule", "chunks"), CUSTOM)
def test_a_schedule_of_ones_own_passes_through_the_same_door(schedule, chunks):
    for stages, microbatches in [(1, 3), (2, 4), (3, 6), (4, 8), (8, 16)]:
        table = lower(schedule, stages, microbatches, chunks)
        assert table.schedule == schedule.__name__
        check(table)


def test_a_v_shaped_placement_uses_both_directions_and_copies_at_the_turn():
    table = lower(v_gpipe, 4, 8, 2)
    assert table.parts.tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [(wire.kind, wire.shift) for wire in table.wires] == [
        ("F", 0), ("F", 1), ("F", 3), ("B", 0), ("B", 1), ("B", 3)
    ]  # fmt: skip
    assert table.messages("F") == 8 * 6  # 7 crossings, one of them on the spot


# ---- runs and colouring ----


@pytest.mark.parametrize("name", SCHEDULES)
def test_runs_cover_all_ticks_and_neighbours_differ(name):
    for p, m in [(1, 1), (1, 5), (2, 1), (4, 8), (4, 3), (8, 24)]:
        table = lower(name, p, m)
        found = runs(table)
        assert [run.start for run in found] == [0, *(run.stop for run in found[:-1])]
        assert found[-1].stop == len(table.ticks)
        for run in found:
            for tick in range(run.start, run.stop):
                assert set(run.work) == {t.kind for row in table.ticks[tick] for t in row}
                assert run.wires == tuple(i for i, w in enumerate(table.wires) if w.used[tick])
        kinds = [(run.work, run.wires) for run in found]
        assert all(a != b for a, b in itertools.pairwise(kinds))


def test_the_number_of_runs_does_not_grow_with_microbatches():
    for name in SCHEDULES:
        assert len(runs(lower(name, 4, 16))) == len(runs(lower(name, 4, 160))) <= 6


def test_colouring_uses_as_many_slots_as_intervals_overlap():
    rng = np.random.default_rng(0)
    for _ in range(200):
        start = rng.integers(-1, 30, size=20)
        stop = start + rng.integers(0, 8, size=20)
        slots, count = colour(start, stop)
        given = [(a, b, n) for a, b, n in zip(start, stop, slots, strict=True) if a >= 0]
        assert count == max((sum(a <= t <= b for a, b, _ in given) for t in range(40)), default=0)
        assert all(n == -1 for a, n in zip(start, slots, strict=True) if a < 0)
        for (a, b, n), (c, d, k) in itertools.combinations(given, 2):
            assert n != k or b < c or d < a


def test_arrays_of_a_table_cannot_be_written():
    table = lower("1f1b", 2, 4)
    for array in (table.f.microbatch, table.b.grad, table.wires[0].slots, table.parts):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
