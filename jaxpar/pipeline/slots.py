"""Slots: where in a stage's ring buffers each value of a pipeline step lives.

The one idea: a value occupies a slot for an interval of ticks, and colouring the intervals gives
the fewest slots possible, which is as many as there are values alive at the worst moment. There
are four families of slots per stage (five with W):

    input   a received activation, from its arrival to its F
    kept    what F keeps for the backward, from F to B (to W where the schedule has W)
    stage   input and kept in one, for remat="stage", where the stage's input is all that is kept
    grad    a received output gradient, from its arrival to its B
    cut     what B hands to W

No JAX import here.
"""

import heapq

import numpy as np

FAMILIES = ("input", "kept", "stage", "grad", "cut")


def assign_slots(
    times: dict[str, np.ndarray], parts: np.ndarray, split: bool
) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    """The slot of every value and the slots per stage, for each family.

    `times` holds the tick of every task as int arrays [parts, M] by kind, `parts` the virtual
    stages [stages, chunks]; `split` says whether the schedule has W. Returns {family: int32
    [parts, M], -1 none} and {family: slots of each stage}.
    """
    forward, backward = times["F"], times["B"]
    used_until = times["W"] if split else backward
    arrives = np.full_like(forward, -1)  # first tick in which the received activation is there
    arrives[1:] = forward[:-1] + 1
    grad_arrives = np.full_like(forward, -1)
    grad_arrives[:-1] = backward[1:] + 1
    intervals = {
        "input": (arrives, forward),
        "kept": (forward, used_until),
        "stage": (np.where(arrives < 0, forward, arrives), used_until),
        "grad": (grad_arrives, backward),
        "cut": (backward if split else np.full_like(forward, -1), used_until),
    }
    slots, counts = {}, {}
    for family, (start, stop) in intervals.items():
        slots[family] = np.full_like(forward, -1)
        per_stage = []
        for row in parts:
            slots[family][row], used = colour(start[row], stop[row])
            per_stage.append(used)
        counts[family] = tuple(per_stage)
    return slots, counts


def colour(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, int]:
    """Gives each interval of ticks start..stop (both included) a slot, as few slots as possible.

    Two intervals that share a tick get different slots. Entries with start < 0 get slot -1.
    Taking the intervals by their start and the lowest free slot is optimal: a new slot is opened
    only when as many intervals are alive as there are slots.

    >>> slots, count = colour(np.array([0, 1, 2]), np.array([1, 3, 4]))
    >>> slots.tolist(), count
    ([0, 1, 0], 2)
    """
    slots = [-1] * start.size
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    begins, ends = start.ravel().tolist(), stop.ravel().tolist()
    for i in np.argsort(start, axis=None, kind="stable").tolist():
        if begins[i] < 0:
            continue
        while busy and busy[0][0] < begins[i]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(count)
            count += 1
        slots[i] = heapq.heappop(free)
        heapq.heappush(busy, (ends[i], slots[i]))
    return np.array(slots, np.int32).reshape(start.shape), count
