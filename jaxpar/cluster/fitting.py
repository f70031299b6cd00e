"""Which settings make a program fit: those that lower memory, each compiled.

The one idea: nothing is guessed. Every change is planned, which sorts out what the model, the batch
or the mesh refuse, and compiled; where too few are enough, the best of the others is changed again.
"""

import dataclasses
from collections.abc import Callable, Iterator

from jaxpar.cluster.report import Report
from jaxpar.layout import Layout

LIMIT = 16
"""Layouts that are compiled at most."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """A layout that was compiled, with the settings that differ from the one asked for."""

    settings: tuple[str, ...]
    layout: Layout
    report: Report | None


@dataclasses.dataclass(frozen=True)
class Search:
    """What `search` found: layouts that fit; how many were compiled; the one of the least peak."""

    fits: tuple[Fit, ...]
    tried: int
    least: Fit | None


def search(
    layout: Layout,
    try_layout: Callable[[Layout], Report],
    *,
    wanted: int = 3,
    limit: int = LIMIT,
    progress: Callable[[Fit], None] = lambda fit: None,
) -> Search:
    """Finds layouts near `layout` for the same devices that fit, by compiling them.

    `try_layout` compiles a layout, or raises ValueError where it is not legal; `progress` is called
    with each that was compiled. Ends with `wanted` fits, after `limit` compiles, or when all
    changes to all layouts that do not fit were tried. What only adds to a fit is not tried.
    """
    fits: list[Fit] = []
    tried: list[Fit] = []
    seen, open_ones = {layout}, [Fit((), layout, None)]
    while open_ones:
        base = open_ones.pop(0)
        for changed in changes(base.layout):
            settings = differences(layout, changed)
            if changed in seen or any(set(settings) >= set(fit.settings) for fit in fits):
                continue
            seen.add(changed)
            try:
                found = Fit(settings, changed, try_layout(changed))
            except ValueError:
                continue
            tried.append(found)
            (fits if found.report.fits else open_ones).append(found)
            progress(found)
            if len(fits) == wanted or len(tried) == limit:
                return Search(tuple(fits), len(tried), _least(tried))
        open_ones.sort(key=lambda fit: fit.report.memory.peak)
    return Search(tuple(fits), len(tried), _least(tried))


def _least(tried: list[Fit]) -> Fit | None:
    return min(tried, key=lambda fit: fit.report.memory.peak, default=None)


def changes(layout: Layout) -> Iterator[Layout]:
    """Layouts with one change that lowers memory, those that cost the least time first."""
    for change in _settings(layout):
        try:
            yield dataclasses.replace(layout, **change)
        except ValueError:
            continue


def _settings(layout: Layout) -> Iterator[dict]:
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield dict(sequence_parallel=True)
    if layout.data > 1 and layout.zero < 1:
        yield dict(zero=1)
    stronger = {"none": ("block",), "dots": ("block",), "block": ("stage", "offload")}
    for remat in stronger.get(layout.remat, ()):
        if remat != "stage" or layout.pipe > 1:
            yield dict(remat=remat)
    for factor in (2, 4):
        yield dict(microbatches=factor * layout.microbatches)
    for zero in range(max(layout.zero, 1) + 1, 4):
        if layout.data > 1:
            yield dict(zero=zero)
    for axis in ("tensor", "pipe"):
        if layout.data % 2 == 0:
            yield _wider(layout, axis)


def _wider(layout: Layout, axis: str) -> dict:
    """Twice as many devices along `axis`, half as many along data; rows of a microbatch as before.

    A pipeline needs as many microbatches as stages to be worth it.
    """
    change = {axis: 2 * getattr(layout, axis), "data": layout.data // 2}
    change["microbatches"] = 2 * layout.microbatches
    if axis == "pipe":
        change["microbatches"] = max(change["microbatches"], change["pipe"])
    return change


def differences(before: Layout, after: Layout) -> tuple[str, ...]:
    """The settings of `after` that differ, as `--set` takes them.

    >>> differences(Layout(data=8), Layout(data=4, tensor=2, remat="block"))
    ('data=4', 'tensor=2', 'remat=block')
    """
    return tuple(
        f"{f.name}={_word(getattr(after, f.name))}"
        for f in dataclasses.fields(Layout)
        if getattr(after, f.name) != getattr(before, f.name)
    )


def _word(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
