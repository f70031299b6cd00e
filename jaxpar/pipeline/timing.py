"""When tasks run: the ticks of the lockstep program, and what a step costs.

The one idea: a schedule is timed twice. *Lockstep* is the compiled program: all stages exchange at
the end of each tick, so a tick takes as long as its busiest stage. *Asynchronous* is an ideal
runtime in which a stage starts a task the moment its inputs have arrived; it is never slower, and
it is what the published formulas assume. No JAX import here.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpar.pipeline.schedules import KINDS, Task

if TYPE_CHECKING:
    from jaxpar.pipeline.table import Table

PHASE = {kind: i for i, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch on one whole stage, in any unit; a chunk takes its 1/chunks share.

    F is the forward, B the backward for the input, W the backward for the weights; a schedule
    that lists no W tasks pays B + W for each B. `send` is the time of one message between stages.
    Raises ValueError for a cost that is negative or not finite, or when F, B and W are all 0.

    >>> Costs(F=1, B=1.5).backward(split=False)
    2.5
    """

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    send: float = 0.0

    def __post_init__(self):
        for name in ("F", "B", "W", "send"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"cost {name}={value}: a time is finite and >= 0; use {name}=1")
        if self.F + self.B + self.W == 0:
            raise ValueError("costs F=0, B=0, W=0: a step needs some work; use F=1,B=1,W=1")

    def backward(self, split: bool) -> float:
        """What one B costs: the whole backward unless the schedule splits off W."""
        return self.B if split else self.B + self.W

    def of(self, table: "Table") -> dict[str, float]:
        """The cost of one task of each kind in this table, per chunk."""
        per_stage = {"F": self.F, "B": self.backward(table.splits_backward), "W": self.W}
        return {kind: cost / table.chunks for kind, cost in per_stage.items()}


UNIT = Costs()  # every kind of work takes 1, sending is free

# ---- cost of a step ----


def tick_times(table: "Table", costs: Costs = UNIT) -> np.ndarray:
    """The time of each tick, float [ticks]: its busiest stage, plus one send if it exchanges."""
    cost = costs.of(table)
    work = {"F": table.f, "B": table.b, "W": table.w}
    busy = sum(cost[kind] * (work[kind].microbatch >= 0) for kind in KINDS)
    sends = np.zeros(len(table.ticks), bool)
    for wire in table.wires:
        if wire.shift:
            sends |= wire.used
    return busy.max(axis=1) + costs.send * sends


def makespan(table: "Table", costs: Costs = UNIT) -> float:
    """The time of one step of the lockstep program.

    >>> from jaxpar.pipeline.table import lower
    >>> makespan(lower("1f1b", stages=4, microbatches=8))  # (8 + 4 - 1) * (F + B + W)
    33.0
    """
    return float(tick_times(table, costs).sum())


def makespan_async(table: "Table", costs: Costs = UNIT) -> float:
    """The time of one step of an ideal asynchronous runtime that keeps each stage's order.

    A message takes `send` on its way and keeps no stage busy. The tasks are visited tick by tick,
    which is an order in which every input has been timed already.

    >>> from jaxpar.pipeline.table import lower
    >>> makespan_async(lower("gpipe", stages=4, microbatches=8))
    33.0
    """
    cost, parts = costs.of(table), table.parts.tolist()
    home = {v: s for s, row in enumerate(parts) for v in row}
    clock = [0.0] * table.stages
    done: dict[tuple[str, int, int], float] = {}
    for rows in table.ticks:
        for stage, row in enumerate(rows):
            for task in row:
                v, m = parts[stage][task.chunk], task.microbatch
                source = {"F": v - 1, "B": v + 1}.get(task.kind)
                if source in home:  # own inputs are listed earlier, so the clock is past them
                    delay = costs.send if home[source] != stage else 0.0
                    clock[stage] = max(clock[stage], done[task.kind, source, m] + delay)
                clock[stage] += cost[task.kind]
                done[task.kind, v, m] = clock[stage]
    return max(clock)


def bubble(table: "Table", costs: Costs = UNIT) -> float:
    """The idle share of the lockstep step, over all stages, between 0 and 1.

    >>> from jaxpar.pipeline.table import lower
    >>> round(bubble(lower("1f1b", stages=4, microbatches=8)), 4)  # (4 - 1) / (8 + 4 - 1)
    0.2727
    """
    busy = table.microbatches * (costs.F + costs.B + costs.W)
    return 1.0 - busy / makespan(table, costs)


# ---- ticks ----


def assign_ticks(name, listed, parts, microbatches):
    """Runs the orders in lockstep: the ticks, and the tick of every task as {kind: [parts, M]}."""
    last, parts = parts.size - 1, parts.tolist()
    never = 1 << 30
    times = {k: [[never] * microbatches for _ in range(last + 1)] for k in PHASE}
    forward, backward = times["F"], times["B"]

    def ready(kind: str, v: int, m: int, tick: int) -> bool:
        if kind == "F":
            return v == 0 or forward[v - 1][m] < tick
        if kind == "B":
            return forward[v][m] <= tick and (v == last or backward[v + 1][m] < tick)
        return backward[v][m] <= tick

    position, left, ticks = [0] * len(listed), sum(map(len, listed)), []
    while left:
        tick, rows = len(ticks), []
        for stage, order in enumerate(listed):
            first, phase = position[stage], -1
            for task in order[first : first + 3]:
                v = parts[stage][task.chunk]
                if PHASE[task.kind] <= phase or not ready(task.kind, v, task.microbatch, tick):
                    break
                phase = PHASE[task.kind]
                times[task.kind][v][task.microbatch] = tick
                position[stage] += 1
            rows.append(order[first : position[stage]])
        if not any(rows):
            raise ValueError(_deadlock(name, listed, position, parts))
        left -= sum(map(len, rows))
        ticks.append(tuple(rows))
    arrays = {kind: np.array(rows, np.int32) for kind, rows in times.items()}
    return tuple(ticks), {kind: np.where(a == never, -1, a) for kind, a in arrays.items()}


def _deadlock(name, listed, position, parts) -> str:
    """Follows the stuck tasks around their circle and says what each one waits for."""
    home = {v: (s, c) for s, row in enumerate(parts) for c, v in enumerate(row)}
    stuck = {s: order[position[s]] for s, order in enumerate(listed) if position[s] < len(order)}
    needs = {}
    for stage, task in stuck.items():
        v = parts[stage][task.chunk]
        source, chunk = home[v - 1 if task.kind == "F" else v + 1]
        needs[stage] = (source, Task(task.kind, task.microbatch, chunk))
    path = [min(stuck)]
    while path[-1] not in path[:-1]:
        path.append(needs[path[-1]][0])
    chunks = len(parts[0])
    circle = path[path.index(path[-1]) :]
    text = f"stage {circle[0]} is stuck at {stuck[circle[0]].text(chunks)}: it waits for "
    for i, stage in enumerate(circle[:-1]):
        source, need = needs[stage]
        first = stuck[source].text(chunks)
        text += f"{need.text(chunks)} of stage {source}, which "
        text += "waits itself" if need == stuck[source] else f"lists {first} before it"
        text += f" and is stuck at {first}: it waits for " if i < len(circle) - 2 else ""
    return f'schedule "{name}" deadlocks: {text}; list one of the awaited tasks earlier'
