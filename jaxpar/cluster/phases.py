"""Which part of a pipelined step an instruction belongs to: warm-up, steady or cool-down.

The one idea: the executor runs the table as a few scans, one for each segment of equal ticks, under
the scopes `segment 0`, `segment 1` and so on. XLA keeps a scope in every `op_name`, even where it
unrolls a segment of one tick and schedules its instructions before or after other segments' loops.
"""

import re

from jaxpar.cluster.hlo_overlap import PhaseOf, scope
from jaxpar.cluster.hlo_walk import Visit
from jaxpar.layout import Layout
from jaxpar.pipeline import ticks
from jaxpar.pipeline.table import Table
from jaxpar.placement import pipeline_table

_SEGMENT = re.compile(r"(?:^|/)segment (\d+)(?:/|$)")


def segment_phases(table: Table) -> list[str]:
    """The phase of each of `ticks.segments(table)`.

    `warm-up`: before any stage runs a backward; `cool-down`: after the last forward; else `steady`.

    >>> segment_phases(pipeline_table(Layout(pipe=4, microbatches=8)))
    ['warm-up', 'steady', 'steady', 'steady', 'cool-down']
    """
    segments = ticks.segments(table)
    last_forward = max(i for i, segment in enumerate(segments) if segment.forward)
    first_backward = min(i for i, segment in enumerate(segments) if segment.backward)
    return [
        "warm-up" if i < first_backward else "cool-down" if i > last_forward else "steady"
        for i in range(len(segments))
    ]


def pipeline_phases(layout: Layout) -> PhaseOf:
    """A `phase_of` for `overlaps`, for programs of this layout.

    The phase of what the ticks do, followed by its scope where it has one: `steady` for the
    exchanges between stages, `steady F` for what a stage's forward sends. What is outside the ticks
    has its scope alone, `step`. `phase_of` raises ValueError for a program with more segments than
    the layout's table.

    >>> phase_of = pipeline_phases(Layout(pipe=2, microbatches=4))
    """
    phases = segment_phases(pipeline_table(layout))

    def phase_of(visit: Visit) -> str:
        op_name = visit.instruction.op_name
        part, found = scope(op_name), _SEGMENT.search(op_name)
        if found is None:
            return part
        number = int(found[1])
        if number >= len(phases):
            raise ValueError(
                f"instruction {visit.instruction.name} is of segment {number}, but schedule "
                f"{layout.schedule!r} with pipe={layout.pipe} and microbatches="
                f"{layout.microbatches} has the segments 0 to {len(phases) - 1}; give the layout "
                "that the program was compiled for"
            )
        return phases[number] if part == "step" else f"{phases[number]} {part}"

    return phase_of
