"""Schedules: the order of work on each stage of a pipeline.

The one idea: a schedule is a function `(stage, stages, microbatches, chunks) -> [F(0), B(0), ...]`
and nothing else. Which tick each task runs in, what is sent, and which buffer slot holds what
are derived from these lists by `jaxpar.pipeline.table`. This module imports neither JAX nor NumPy.

Words: *stage* is one coordinate of the `pipe` axis, *chunk* one of the model parts it holds, and
*virtual stage* the position of a part in the model, 0 .. stages*chunks-1. A task is F (forward),
B (backward) or W (backward for the weights alone). Where a schedule lists no W, its B is the whole
backward.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KINDS = ("F", "B", "W")  # also the order in which one stage runs them within a tick


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work: `kind` (F, B or W) of one microbatch through one chunk of a stage.

    >>> F(3).text(), B(1, chunk=0).text(chunks=2)
    ('F3', 'B1.0')
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def text(self, chunks: int = 1) -> str:
        """Returns "F3", or "F3.1" (microbatch.chunk) where a stage holds more than one chunk."""
        suffix = f".{self.chunk}" if chunks > 1 else ""
        return f"{self.kind}{self.microbatch}{suffix}"


Schedule = Callable[[int, int, int, int], Sequence[Task]]  # (stage, stages, microbatches, chunks)
Placement = Callable[[int, int, int, int], int]  # (stage, chunk, stages, chunks) -> virtual stage


def F(microbatch: int, chunk: int = 0) -> Task:
    """The forward of a microbatch through a chunk: `F(3)`, `F(3, chunk=1)`."""
    return Task("F", microbatch, chunk)


def B(microbatch: int, chunk: int = 0) -> Task:
    """The backward of a microbatch; for the chunk's input alone where the schedule has W tasks."""
    return Task("B", microbatch, chunk)


def W(microbatch: int, chunk: int = 0) -> Task:
    """The backward for the weights alone; a schedule lists it for every microbatch or for none."""
    return Task("W", microbatch, chunk)


# ---- placements: which part of the model a stage's chunk is ----


def ring(stage: int, chunk: int, stages: int, chunks: int) -> int:
    """Chunk c of stage s is part c*stages + s: the model goes around the stages `chunks` times."""
    return chunk * stages + stage


def v_shape(stage: int, chunk: int, stages: int, chunks: int) -> int:
    """Every second chunk runs back down, so that first and last part share stage 0 (2 chunks)."""
    return chunk * stages + (stage if chunk % 2 == 0 else stages - 1 - stage)


# ---- the schedules ----


def gpipe(stage: int, stages: int, microbatches: int, chunks: int) -> list[Task]:
    """All forwards, then all backwards; with chunks, one chunk after the other ("looped" GPipe).

    Keeps every microbatch. Bubble (P-1)/(chunks*M + P-1) for M >= P (GPipe, arXiv 1811.06965;
    breadth-first order: arXiv 2211.05953).

    >>> [task.text() for task in gpipe(0, stages=2, microbatches=2, chunks=1)]
    ['F0', 'F1', 'B0', 'B1']
    """
    forward = [F(m, c) for c in range(chunks) for m in range(microbatches)]
    return forward + [B(m, c) for c in reversed(range(chunks)) for m in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int, chunks: int) -> list[Task]:
    """Warms up with 2(P-1-s) forwards, then alternates one forward and one backward.

    Twice the warm-up of the asynchronous 1F1B (P-1-s, arXiv 2104.04473): in a lockstep program a
    microbatch is back one tick per stage after it left, on the way there and on the way back, so
    that with this warm-up every tick in the middle holds an F and a B on every stage ("eager
    1F1B"). Bubble (P-1)/(M+P-1); stage s keeps at most 2(P-1-s)+1 microbatches, whatever M is.

    Raises ValueError for chunks > 1, which is what `interleaved` is for.

    >>> [task.text() for task in one_f_one_b(0, stages=2, microbatches=4, chunks=1)]
    ['F0', 'F1', 'F2', 'B0', 'F3', 'B1', 'B2', 'B3']
    """
    if chunks != 1:
        raise ValueError(
            f'schedule="1f1b" with chunks={chunks}: 1f1b runs one chunk per stage; '
            f'use schedule="interleaved" with chunks={chunks}, or chunks=1'
        )
    warm_up = min(microbatches, 2 * (stages - 1 - stage))
    order = [F(m) for m in range(warm_up)]
    for m in range(microbatches):
        if warm_up + m < microbatches:
            order.append(F(warm_up + m))
        order.append(B(m))
    return order


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list[Task]:
    """1F1B over `chunks` parts per stage: the bubble is `chunks` times smaller.

    Microbatches go through chunk 0, 1, ... in rounds; a round holds at least `stages` of them, so
    that a round's first microbatch has come around the ring when its next chunk is due. Where M is
    a multiple of P this is Megatron's order (arXiv 2104.04473, 2205.05198) with P microbatches a
    round; otherwise the M//P rounds share the microbatches as evenly as possible. Bubble
    (P-1)/(chunks*M + P-1) for every M >= P. With M < P the one round waits for the ring:
    the step takes (chunks*P + M-1) ticks of F and as many of B.

    The order is that of the ticks below: unit k of the forward runs on stage s at tick k + s, and
    the backward starts where the last part's forward meets it.

    >>> [task.text(2) for task in interleaved(1, stages=2, microbatches=2, chunks=2)]
    ['F0.0', 'F1.0', 'F0.1', 'B0.1', 'F1.1', 'B1.1', 'B0.0', 'B1.0']
    """
    sizes = rounds(microbatches, stages)
    down = stages - 1 - stage
    turn = (chunks - 1) * max(sizes[0], stages) + stages - 1  # tick of the first backward
    timed, start = [], 0
    for size in sizes:
        step = max(size, stages)  # ticks from one chunk to the next
        for chunk in range(chunks):
            forward_tick = start * chunks + chunk * step + stage
            backward_tick = turn + start * chunks + (chunks - 1 - chunk) * step + down
            for i in range(size):
                timed.append((forward_tick + i, 0, F(start + i, chunk)))
                timed.append((backward_tick + i, 1, B(start + i, chunk)))
        start += size
    return [task for _, _, task in sorted(timed, key=lambda entry: entry[:2])]


def rounds(microbatches: int, stages: int) -> list[int]:
    """Splits the microbatches of `interleaved` into rounds of at least `stages`, largest first.

    >>> rounds(8, 4), rounds(10, 4), rounds(3, 4)
    ([4, 4], [5, 5], [3])
    """
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    return [size + (i < larger) for i in range(count)]


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def get_schedule(schedule: str | Schedule) -> Schedule:
    """Returns the schedule of this name; a function is returned as it is.

    >>> get_schedule("1f1b") is one_f_one_b
    True
    """
    if callable(schedule):
        return schedule
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    near = difflib.get_close_matches(str(schedule).lower(), SCHEDULES, n=1, cutoff=0.4)
    hint = f'did you mean "{near[0]}"? ' if near else ""
    raise ValueError(
        f'schedule="{schedule}" is not known; {hint}use one of {", ".join(SCHEDULES)}, '
        "or pass a function (stage, stages, microbatches, chunks) -> [F(0), B(0), ...]"
    )


def schedule_name(schedule: str | Schedule) -> str:
    """The registered name of a schedule, or the name of the user's function."""
    if isinstance(schedule, str):
        return schedule
    for name, known in SCHEDULES.items():
        if known is schedule:
            return name
    return getattr(schedule, "__name__", type(schedule).__name__)


# ---- the orders of all stages, checked ----


def orders(
    schedule: str | Schedule, stages: int, microbatches: int, chunks: int = 1
) -> tuple[tuple[Task, ...], ...]:
    """Returns the order of work of every stage, after checking each one by itself.

    Raises ValueError where a size is not a positive integer, a task is missing, repeated or
    unknown, or a stage lists a backward before its own forward.

    >>> [task.text() for task in orders("1f1b", stages=2, microbatches=2)[1]]
    ['F0', 'B0', 'F1', 'B1']
    """
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: a schedule needs an integer >= 1; use {name}=1")
    function, name = get_schedule(schedule), schedule_name(schedule)
    result = tuple(tuple(function(s, stages, microbatches, chunks)) for s in range(stages))
    split = any(task.kind == "W" for order in result for task in order if isinstance(task, Task))
    kinds = KINDS if split else KINDS[:2]
    every = {Task(k, m, c) for k in kinds for m in range(microbatches) for c in range(chunks)}
    for stage, order in enumerate(result):
        _check_complete(f'schedule "{name}", stage {stage}', order, every, chunks)
        _check_own_inputs(f'schedule "{name}", stage {stage}', order, chunks)
    return result


def _check_complete(where: str, order: Sequence[Task], every: set[Task], chunks: int) -> None:
    strange = [task for task in order if not isinstance(task, Task)]
    if strange:
        raise ValueError(
            f"{where}: {strange[0]!r} is no task; list F(m), B(m) or W(m), with chunk= for chunks"
        )
    counts = Counter(order)
    wrong = {
        "which does not exist for these microbatches and chunks": counts.keys() - every,
        "more than once": {task for task, n in counts.items() if n > 1},
    }
    for what, tasks in wrong.items():
        if tasks:
            raise ValueError(
                f"{where} lists {_first(tasks, chunks)} {what}; list each task exactly once"
            )
    if missing := every - counts.keys():
        raise ValueError(
            f"{where} lacks {_first(missing, chunks)} ({len(missing)} of {len(every)} tasks are "
            "missing); list each task exactly once, and W for every microbatch or for none"
        )


def _first(tasks: set[Task], chunks: int) -> str:
    """The first of the tasks by kind, microbatch and chunk."""
    order = {kind: i for i, kind in enumerate(KINDS)}
    return min(tasks, key=lambda t: (order.get(t.kind, 3), t.microbatch, t.chunk)).text(chunks)


def _check_own_inputs(where: str, order: Sequence[Task], chunks: int) -> None:
    seen: set[Task] = set()
    for task in order:
        if task.kind != "F":
            need = Task("F" if task.kind == "B" else "B", task.microbatch, task.chunk)
            if need not in seen:
                raise ValueError(
                    f"{where}: {task.text(chunks)} comes before {need.text(chunks)}, whose result "
                    f"it needs; list {need.text(chunks)} first"
                )
        seen.add(task)
