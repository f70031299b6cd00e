"""How often each phase of a pipelined step runs on a device: what `costs` multiplies with.

The one idea: the table says it. A stage runs an F and a B for each of its microbatch-chunks; with
idle="compute" one in every tick in which any stage does.
"""

import dataclasses
import re
from collections.abc import Callable
from fractions import Fraction

import jax
import numpy as np

from jaxpar.layout import Layout
from jaxpar.parts import num_layers
from jaxpar.pipeline import ticks
from jaxpar.pipeline.table import Table
from jaxpar.placement import Placement, pipeline_table, place_layers


@dataclasses.dataclass(frozen=True)
class Passes:
    """Blocks that a device, the busiest where they differ, runs in a step."""

    forward: int
    backward: int


def passes(model, layout: Layout) -> Passes:
    """Blocks run in a step; `model` holds its layers in canonical or in storage order."""
    if layout.pipe == 1:
        return Passes(*2 * (layout.microbatches * num_layers(model),))
    table, counts = pipeline_table(layout), placement_of(model, layout).counts
    if layout.circulates:  # places without a layer are run as well
        counts = np.full_like(counts, counts.max())
    stages = np.arange(table.stages)
    found = []
    for work in (table.f, table.b):
        runs = work.microbatch >= 0
        if layout.computes_idle:
            runs = np.broadcast_to(runs.any(axis=1, keepdims=True), runs.shape)
        blocks = counts[stages, np.maximum(work.chunk, 0)]
        found.append(int((blocks * runs).sum(axis=0).max()))
    return Passes(*found)


def placement_of(model, layout: Layout) -> Placement:
    """Where the layers of `model`, by its config or else by its stack, lie on the stages."""
    config = getattr(model, "config", None)
    return place_layers(layout, getattr(config, "num_layers", None) or num_layers(model))


def stored_model(model, layout: Layout):
    """The shapes of `model` in storage order: padded where stages hold unequal counts."""
    if layout.pipe == 1:
        return model
    return jax.eval_shape(placement_of(model, layout).store, model)


def over_pipe(layout: Layout) -> list[tuple[str, str, tuple[str, ...], int]]:
    """(what, operation, axes, executions) of what activations send between stages in a step."""
    table, m, permute = pipeline_table(layout), layout.microbatches, "collective-permute"
    rows = [
        ("activations to the next stage", permute, table.exchanges("F")),
        ("gradients to the stage before", permute, table.exchanges("B")),
        ("embedding forward", "all-reduce", m),
        ("embedding backward", "all-reduce", m),
        ("head forward", "all-reduce", m),
        ("head backward", "all-reduce", m),
    ]
    return [(what, op, ("pipe",), count) for what, op, count in rows if count]


def branch_share(layout: Layout, model) -> Callable:
    """How often the branches of the compiled step run what they hold, for `cluster.hlo.walk`.

    Returns a function of a `conditional` and a branch's number, as `branch_share` wants it. The
    conditionals of a phase have its name (`jax.named_scope`); those of all segments together run
    as often as the table says, so each is given the average.
    """
    table, counts = pipeline_table(layout), placement_of(model, layout).counts
    shares, size = _shares(table), int(counts.max())
    layers = Fraction(int(counts.sum(axis=1).max()), counts.shape[1] * size)
    for phase in "FB":  # these branches are around each layer of a stage
        shares[phase] = layers if layout.computes_idle else layers * shares[phase]
        if layout.circulates:  # there are none
            shares[phase] = Fraction(1)

    def share(conditional, _) -> Fraction:
        own = re.search(
            r"/(embed_back|embed|head|F|B)/(?:(?!cond(?:/|$))[^/]+/)*cond$", conditional.op_name
        )
        return Fraction(1) if own is None else shares[own[1]]  # else the model's own branch

    return share


def _shares(table: Table) -> dict[str, Fraction]:
    """Phase -> executions per tick of those segments that branch around it."""
    segments = ticks.segments(table)
    edges = ticks.edges(table)
    found = {}
    for phase, work in (("F", "forward"), ("B", "backward")):
        length = sum(s.stop - s.start for s in segments if getattr(s, work))
        found[phase] = Fraction(table.microbatches * table.chunks, length)
    for phase in edges:
        some = [s for s in segments if getattr(s, phase) == "sometimes"]
        length = sum(s.stop - s.start for s in some)
        times = sum(int((edges[phase][s.start : s.stop] >= 0).sum()) for s in some)
        found[phase] = Fraction(times, max(length, 1))
    return found
