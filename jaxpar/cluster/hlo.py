"""Read a compiled program back: its collectives, its operations, how often each part runs.

The one idea: the optimized HLO text says everything that will happen, so numbers about a program
are read from it and not guessed. This module gathers the readers; each has a file of its own:

    hlo_text          text -> Program: computations, instructions, shapes, attributes
    hlo_walk          executions per step: loops, branches, calls, asynchronous wrappers
    hlo_groups        replica groups in every form, and the mesh axes they stand for
    hlo_promotion     types that XLA widened (bf16 on CPU)
    hlo_collectives   collectives with axes and bytes, and their sums
    hlo_flops         operations of matrix products, convolutions and attention

None of them imports JAX: the text may come from a file or from another machine.
"""

from jaxpar.cluster.hlo_collectives import (
    UNKNOWN_AXES,
    Buffer,
    Collective,
    Traffic,
    by_axis,
    collectives,
)
from jaxpar.cluster.hlo_flops import Flops, flops
from jaxpar.cluster.hlo_groups import axes_of_groups, axes_of_pairs, parse_groups
from jaxpar.cluster.hlo_text import (
    Computation,
    Instruction,
    Program,
    Shape,
    instruction_lines,
    parse,
    parse_shape,
)
from jaxpar.cluster.hlo_walk import Visit, branches, trip_count, walk

__all__ = [
    "UNKNOWN_AXES",
    "Buffer",
    "Collective",
    "Computation",
    "Flops",
    "Instruction",
    "Program",
    "Shape",
    "Traffic",
    "Visit",
    "axes_of_groups",
    "axes_of_pairs",
    "branches",
    "by_axis",
    "collectives",
    "flops",
    "instruction_lines",
    "parse",
    "parse_groups",
    "parse_shape",
    "trip_count",
    "walk",
]
