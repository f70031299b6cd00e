"""Which layers each part of the pipeline holds, and where they lie on the mesh.

The one idea: a model's layers are cut in order into stages*chunks *parts* (virtual stages), and
counts per part say everything. *Canonical* order is the model's own, 0 .. num_layers-1. *Storage*
order is the mesh's: by stage, then chunk, each padded to the largest count. No JAX import here.
"""

from collections.abc import Sequence

import numpy as np

from jaxpar.pipeline.schedules import Placement, ring


def split_layers(
    num_layers: int,
    stages: int,
    chunks: int = 1,
    counts: Sequence[int] | None = None,
    head_cost: float = 0.0,
    embed_cost: float = 0.0,
) -> tuple[int, ...]:
    """Returns how many layers each of the stages*chunks parts holds, in the model's order.

    The largest cost of a part is as small as possible, then the next largest, and so on; where
    that leaves a choice, earlier parts hold more. A part costs its layers plus `embed_cost` on the
    first and `head_cost` on the last, both in layers (0 where embedding and head are spread over
    all stages). A part whose extra cost outweighs the others' layers may hold none. `counts`, if
    given, is checked and returned as it is.

    Raises ValueError where a part would be left without work, or `counts` do not fit.

    >>> split_layers(30, stages=4)
    (8, 8, 7, 7)
    >>> split_layers(30, stages=4, head_cost=2)
    (8, 8, 8, 6)
    """
    _check_sizes(num_layers, stages, chunks, head_cost, embed_cost)
    parts = stages * chunks
    if counts is not None:
        return _checked(counts, num_layers, stages, chunks)
    if num_layers < parts:
        raise ValueError(
            f"num_layers={num_layers} on pipe={stages} x chunks={chunks} = {parts} parts leaves "
            f"parts without a layer; use {_nearest(num_layers, stages)} or at least {parts} layers"
        )
    costs = [0.0] * parts
    costs[0] += embed_cost
    costs[-1] += head_cost
    result = [0] * parts
    for _ in range(num_layers):  # one layer at a time, each where the cost stays lowest
        part = costs.index(min(costs))
        costs[part] += 1
        result[part] += 1
    return tuple(result)


def _check_sizes(num_layers, stages, chunks, head_cost, embed_cost) -> None:
    for name, value in (("num_layers", num_layers), ("pipe", stages), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name}={value}: a split needs at least 1; use {name}=1 or more")
    for name, value in (("head_cost", head_cost), ("embed_cost", embed_cost)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value}: a cost in layers is finite and >= 0; use {name}=0")


def _nearest(num_layers: int, stages: int) -> str:
    if num_layers >= stages:
        return f"chunks={num_layers // stages}"
    return f"pipe={num_layers} with chunks=1"


def _checked(counts, num_layers, stages, chunks) -> tuple[int, ...]:
    """The user's counts, if they are one non-negative integer per part that sum to num_layers."""
    given, parts = list(counts), stages * chunks
    rule = f"pipe={stages} x chunks={chunks} needs {parts} counts, all >= 0, that sum to "
    rule += f"num_layers={num_layers}"
    use = f"use {list(split_layers(num_layers, stages, chunks))}" if num_layers >= parts else ""
    use = use or f"use {[1] * num_layers + [0] * (parts - num_layers)}"
    if len(given) != parts:
        raise ValueError(f"layers_per_stage={given} has {len(given)} entries: {rule}; {use}")
    if any(not isinstance(n, int | np.integer) or n < 0 for n in given):
        raise ValueError(f"layers_per_stage={given} has an entry that is no count: {rule}; {use}")
    if sum(given) != num_layers:
        raise ValueError(f"layers_per_stage={given} sum to {sum(given)}: {rule}; {use}")
    return tuple(int(n) for n in given)


def storage_order(
    counts: Sequence[int], stages: int, chunks: int = 1, placement: Placement = ring
) -> np.ndarray:
    """Returns the canonical layer at each place of storage: int32 [stages, chunks, max(counts)].

    Places beyond a part's own count are padding, -1. Raises ValueError where `counts` does not
    hold one entry per part.

    >>> storage_order((2, 2, 1, 1), stages=2, chunks=2).tolist()
    [[[0, 1], [4, -1]], [[2, 3], [5, -1]]]
    """
    counts = _checked(counts, sum(counts), stages, chunks)
    starts = np.cumsum((0, *counts))
    order = np.full((stages, chunks, max(counts)), -1, np.int32)
    for stage in range(stages):
        for chunk in range(chunks):
            part = placement(stage, chunk, stages, chunks)
            order[stage, chunk, : counts[part]] = np.arange(starts[part], starts[part + 1])
    return order


def canonical_order(storage: np.ndarray) -> np.ndarray:
    """The inverse of `storage_order`: the flat storage place of each canonical layer, int32 [L].

    For an array stored as [stages, chunks, max_count, ...], `x.reshape(-1, ...)[places]` is the
    model's own order, without padding.

    >>> canonical_order(storage_order((2, 2, 1, 1), stages=2, chunks=2)).tolist()
    [0, 1, 4, 5, 2, 6]
    """
    flat = storage.reshape(-1)
    places = np.flatnonzero(flat >= 0)
    return places[np.argsort(flat[places])].astype(np.int32)
