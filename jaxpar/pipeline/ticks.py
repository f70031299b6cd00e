"""A table as the executor reads it: segments of equal ticks, and arrays to scan over.

Gradients are sent one tick after they were made, at the start of the next one, so that the
permutation has a whole stage's forward to hide behind; activations are sent as soon as they are
made and hide behind the backward.
"""

import dataclasses

import numpy as np

from jaxpar.pipeline.table import Table


@dataclasses.dataclass(frozen=True)
class Segment:
    """Ticks start..stop-1 of one kind.

    `forward`, `backward`: whether any stage runs an F, a B. `sends`: wires of activations used in
    each tick; `receives`: wires of gradients whose values of the tick before arrive. Each wire is
    (position in table.wires, pairs of source and target stage). `embed`, `head`, `embed_back`:
    "never", "sometimes" or "always" a microbatch enters, leaves, or its gradient reaches tokens.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    sends: tuple
    receives: tuple
    embed: str
    head: str
    embed_back: str


def edges(table: Table) -> dict[str, np.ndarray]:
    """The microbatch, int32 [ticks], that enters the first part, leaves the last, and comes back
    to the first; -1 for none."""
    first, last = places(table)
    return {
        "embed": np.where(
            table.f.chunk[:, first[0]] == first[1], table.f.microbatch[:, first[0]], -1
        ),
        "head": np.where(table.f.chunk[:, last[0]] == last[1], table.f.microbatch[:, last[0]], -1),
        "embed_back": np.where(
            table.b.chunk[:, first[0]] == first[1], table.b.microbatch[:, first[0]], -1
        ),
    }


def places(table: Table) -> tuple[tuple[int, int], tuple[int, int]]:
    """(stage, chunk) of the model's first and of its last part."""
    where = np.argwhere(table.parts == 0)[0], np.argwhere(table.parts == table.parts.max())[0]
    return tuple(tuple(map(int, w)) for w in where)


def loss_gradient_waits(table: Table) -> bool:
    """Whether some microbatch's loss gradient is made in an earlier tick than its B uses it."""
    stage, chunk = places(table)[1]
    made = np.where(table.f.chunk[:, stage] == chunk, table.f.microbatch[:, stage], -1)
    used = np.where(table.b.chunk[:, stage] == chunk, table.b.microbatch[:, stage], -1)
    return not np.array_equal(made, used)


def segments(table: Table) -> list[Segment]:
    """Splits the ticks into the fewest runs that one program body can serve."""
    at = edges(table)
    kinds = []
    for t in range(len(table.ticks)):
        sends = tuple(i for i, w in enumerate(table.wires) if w.kind == "F" and w.used[t])
        receives = tuple(
            i for i, w in enumerate(table.wires) if w.kind == "B" and t and w.used[t - 1]
        )
        work = tuple(bool((w.microbatch[t] >= 0).any()) for w in (table.f, table.b))
        kinds.append((*work, sends, receives))
    starts = [t for t in range(len(kinds)) if t == 0 or kinds[t] != kinds[t - 1]]
    result = []
    for a, b in zip(starts, [*starts[1:], len(kinds)], strict=True):
        forward, backward, sends, receives = kinds[a]
        result.append(
            Segment(
                a,
                b,
                forward,
                backward,
                tuple((i, _pairs(table, i, a, b)) for i in sends),
                tuple((i, _pairs(table, i, a - 1, b - 1)) for i in receives),
                *(_often(at[name][a:b]) for name in ("embed", "head", "embed_back")),
            )
        )
    return result


def _pairs(table: Table, wire: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    sends, shift = table.wires[wire].sends, table.wires[wire].shift
    return tuple(
        (s, (s + shift) % table.stages) for s in range(table.stages) if sends[start:stop, s].any()
    )


def _often(microbatch: np.ndarray) -> str:
    has = microbatch >= 0
    return "always" if has.all() else "sometimes" if has.any() else "never"


def arrays(table: Table, segment: Segment, stage_slots: bool) -> dict:
    """What a segment's body scans over, [ticks, ...]: `stage` has one entry per stage.

    `stage_slots`: received activations go where they are kept (remat="stage").
    """
    span = slice(segment.start, segment.stop)
    before = np.arange(segment.start - 1, segment.stop - 1)
    stage = {}
    for name, work in (("f", table.f), ("b", table.b)):
        for field in ("microbatch", "chunk", "input", "kept", "stage", "grad"):
            stage[f"{name}_{field}"] = getattr(work, field)[span]
    for i, _ in segment.sends:
        wire = table.wires[i]
        stage[f"arrives_{i}"] = (wire.stage_slots if stage_slots else wire.slots)[span]
    for i, _ in segment.receives:
        stage[f"arrives_{i}"] = table.wires[i].slots[before]
    last = places(table)[1][0]
    alike = {name: a[span] for name, a in edges(table).items()}
    alike |= {"head_slot": table.f.kept[span, last], "head_slot_used": table.b.kept[span, last]}
    return {"stage": stage, "alike": alike}
