"""Tables: a schedule lowered to the ticks of a lockstep program, with every slot and message.

The one idea: in a tick each stage runs at most one F, one B and one W, in this order; then all
stages exchange at once. So a neighbour has a value one tick after it was made, while a stage's own
F feeds its own B of the same tick. Each stage works through its list as early as this
allows and never runs a task before one listed ahead of it: what is kept is what the list says.

Values live in numbered slots of ring buffers, one family per use: see `jaxpar.pipeline.slots`. An
arrival at the end of a tick may reuse a slot that was read in this tick: read first, then write.
No JAX import here.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpar.pipeline.schedules import (
    KINDS,
    Schedule,
    Task,
    get_schedule,
    orders,
    ring,
    schedule_name,
)
from jaxpar.pipeline.slots import FAMILIES, assign_slots
from jaxpar.pipeline.timing import assign_ticks


@dataclass(frozen=True, eq=False)
class Work:
    """Who runs one kind of task when, and with which slots: int32 arrays [ticks, stages], -1 none.

    F reads `input` and writes `kept`; B reads `kept` and `grad` and writes `cut`; W reads `kept`
    and `cut`. With remat="stage", `stage` takes the place of `input` and `kept`. The model's first
    part has `input` -1 (it reads tokens; its F writes `stage`), its last part `grad` -1 (loss).
    """

    microbatch: np.ndarray
    chunk: np.ndarray
    input: np.ndarray
    kept: np.ndarray
    stage: np.ndarray
    grad: np.ndarray
    cut: np.ndarray


@dataclass(frozen=True, eq=False)
class Wire:
    """One permutation of the exchange: every value of this kind that moves `shift` stages on.

    `kind` "F" carries activations, "B" input gradients, from stage s to (s + shift) mod stages.
    Shift 0 is a copy on the spot, no message. A ring has the wires F, shift 1 and B, shift
    stages-1, fewer where nothing is sent. All arrays are [ticks, stages]:

    `sends`       bool; this stage's result of this tick goes out
    `slots`       int32; where the receiver writes at the end of this tick, -1 where nothing comes:
                  a slot of family input (F) or grad (B)
    `stage_slots` int32; the same in family stage (F only; all -1 for B)
    """

    kind: str
    shift: int
    sends: np.ndarray
    slots: np.ndarray
    stage_slots: np.ndarray

    @cached_property
    def used(self) -> np.ndarray:
        """Whether any stage sends: bool [ticks]."""
        return self.sends.any(axis=1)


@dataclass(frozen=True, eq=False)
class Table:
    """A lowered schedule; build it with `lower`. Counts are per stage unless they say otherwise."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    orders: tuple[tuple[Task, ...], ...]  # [stage][i], as the schedule lists them
    ticks: tuple[tuple[tuple[Task, ...], ...], ...]  # [tick][stage] -> the tasks run there
    parts: np.ndarray  # [stages, chunks] -> the virtual stage held there
    f: Work
    b: Work
    w: Work  # all -1 where B is the whole backward
    wires: tuple[Wire, ...]
    slots_input: tuple[int, ...]
    slots_kept: tuple[int, ...]
    slots_stage: tuple[int, ...]
    slots_grad: tuple[int, ...]
    slots_cut: tuple[int, ...]

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule has W tasks; without them B is the whole backward."""
        return bool((self.w.microbatch >= 0).any())

    @property
    def live(self) -> tuple[int, ...]:
        """The most microbatch-chunks each stage keeps for the backward at one time."""
        return self.slots_kept

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of family `stage`: places for an activation received or kept, on each stage."""
        return self.slots_stage

    def messages(self, kind: str) -> int:
        """Values that travel between stages in one step; kind "F" activations, "B" gradients."""
        return sum(int(w.sends.sum()) for w in self.wires if w.kind == kind and w.shift)

    def exchanges(self, kind: str) -> int:
        """Permutations that carry the messages of this kind, over all ticks."""
        return sum(int(w.used.sum()) for w in self.wires if w.kind == kind and w.shift)


def lower(schedule: str | Schedule, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Lowers a schedule, by name or as a function, to the table that an executor runs.

    A schedule with an attribute `placement(stage, chunk, stages, chunks) -> virtual stage` decides
    which part of the model each chunk is; the default is `schedules.ring`.

    Raises ValueError where the orders are incomplete, list a task before its input, or deadlock.

    >>> table = lower("1f1b", stages=2, microbatches=3)
    >>> [[task.text() for task in row] for row in table.ticks[1]]
    [['F1'], ['F0', 'B0']]
    >>> len(table.ticks), table.live, table.messages("F")
    (5, (3, 1), 3)
    """
    name, listed = schedule_name(schedule), orders(schedule, stages, microbatches, chunks)
    parts = _parts(schedule, stages, chunks)
    ticks, times = assign_ticks(name, listed, parts, microbatches)
    split = bool((times["W"] >= 0).all())
    slots, counts = assign_slots(times, parts, split)
    return Table(
        schedule=name,
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        orders=listed,
        ticks=ticks,
        parts=_frozen(parts),
        f=_work(len(ticks), times["F"], parts, slots, ("input", "kept", "stage")),
        b=_work(len(ticks), times["B"], parts, slots, ("kept", "stage", "grad", "cut")),
        w=_work(len(ticks), times["W"], parts, slots, ("kept", "stage", "cut")),
        wires=_wires(len(ticks), times, parts, slots),
        **{f"slots_{family}": counts[family] for family in FAMILIES},
    )


def _parts(schedule: str | Schedule, stages: int, chunks: int) -> np.ndarray:
    """The placement as an array [stages, chunks] of virtual stages, each exactly once."""
    place = getattr(get_schedule(schedule), "placement", ring)
    parts = [[place(s, c, stages, chunks) for c in range(chunks)] for s in range(stages)]
    if sorted(v for row in parts for v in row) != list(range(stages * chunks)):
        raise ValueError(
            f'schedule "{schedule_name(schedule)}": its placement gives the virtual stages {parts} '
            f"to (stage, chunk); each of 0..{stages * chunks - 1} must appear exactly once, as in "
            "schedules.ring or schedules.v_shape"
        )
    return np.array(parts, np.int32)


# ---- the arrays an executor indexes by [tick, stage] ----


def _work(length, time, parts, slots, families) -> Work:
    """Spreads one kind of task, whose ticks are `time` [parts, M], over arrays [ticks, stages]."""
    stage_of, chunk_of = _homes(parts)
    v, m = np.nonzero(time >= 0)
    at = (time[v, m], stage_of[v])
    values = {"microbatch": m, "chunk": chunk_of[v]}
    values |= {family: slots[family][v, m] for family in families}
    arrays = {}
    for field in ("microbatch", "chunk", *FAMILIES):
        arrays[field] = np.full((length, len(parts)), -1, np.int32)
        if field in values:
            arrays[field][at] = values[field]
        _frozen(arrays[field])
    return Work(**arrays)


def _wires(length, times, parts, slots) -> tuple[Wire, ...]:
    """Groups what moves from part to part by kind and by how many stages it moves on."""
    stage_of, _ = _homes(parts)
    stages, last = len(parts), parts.size - 1
    wires = []
    for kind, step, family in (("F", 1, "input"), ("B", -1, "grad")):
        source = np.arange(last) if kind == "F" else np.arange(1, last + 1)
        shifts = (stage_of[source + step] - stage_of[source]) % stages
        for shift in np.unique(shifts).tolist():
            v = source[shifts == shift]
            tick = times[kind][v]
            sends = np.zeros((length, stages), bool)
            sends[tick, stage_of[v][:, None]] = True
            arrivals = np.full((2, length, stages), -1, np.int32)
            arrivals[0, tick, stage_of[v + step][:, None]] = slots[family][v + step]
            if kind == "F":
                arrivals[1, tick, stage_of[v + step][:, None]] = slots["stage"][v + step]
            wires.append(Wire(kind, shift, _frozen(sends), *_frozen(arrivals)))
    return tuple(wires)


def _homes(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The stage and the chunk of every virtual stage."""
    place = np.argsort(parts, axis=None)
    return place // parts.shape[1], place % parts.shape[1]


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


# ---- runs of equal ticks ----


@dataclass(frozen=True)
class Run:
    """Consecutive ticks start..stop-1 in which the same kinds of work and the same wires occur.

    `work` holds the kinds that any stage runs, in phase order ("FB"); `wires` the positions in
    `table.wires` that any stage sends on.
    """

    start: int
    stop: int
    work: str
    wires: tuple[int, ...]


def runs(table: Table) -> tuple[Run, ...]:
    """Splits the ticks into the fewest runs of one kind, for an executor that scans over each.

    >>> [(run.start, run.stop, run.work) for run in runs(lower("1f1b", 2, 4))]
    [(0, 1, 'F'), (1, 4, 'FB'), (4, 5, 'FB'), (5, 6, 'B')]
    """
    kinds = []
    for tick, rows in enumerate(table.ticks):
        present = {task.kind for row in rows for task in row}
        sending = tuple(i for i, wire in enumerate(table.wires) if wire.used[tick])
        kinds.append(("".join(kind for kind in KINDS if kind in present), sending))
    starts = [t for t in range(len(kinds)) if t == 0 or kinds[t] != kinds[t - 1]]
    stops = starts[1:] + [len(kinds)]
    return tuple(Run(a, b, *kinds[a]) for a, b in zip(starts, stops, strict=True))
