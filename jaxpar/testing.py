"""Assertions on compiled programs, for test suites of one's own.

The one idea: what a program sends and needs is known before it runs, so a test can hold it. Each
assertion takes a `jaxpar.cluster.Report` and names in numbers what is different.
"""

from collections.abc import Mapping

from jaxpar.cluster.report import Report, number
from jaxpar.layout import nearest

_NUMBERS = ("count", "bytes")


def assert_collectives(
    report: Report,
    expected: Mapping[tuple[str, str], Mapping[str, int | float]],
    *,
    no_others: bool = False,
) -> None:
    """Asserts what a program sends: (operation, axis) -> {"count": ..., "bytes": ...}.

    Executions and payload bytes per step and device, as the report's table sums them; either may
    be left out, and `axis` joins several with "+", as in `data+tensor`. With `no_others` a
    collective that is not expected is an error. Raises AssertionError that names each difference.

    >>> assert_collectives(report, {("all-reduce", "data"): dict(count=3)})  # doctest: +SKIP
    """
    found = report.by_axis
    wrong = []
    for (op, axis), numbers in expected.items():
        for name in numbers:
            if name not in _NUMBERS:
                raise ValueError(f"{op} over {axis}: no number {name!r}; {nearest(name, _NUMBERS)}")
        sums = found.get((op, axis))
        if sums is None:
            if any(numbers.values()) or not numbers:
                wrong.append(f"{op} over {axis}: expected {_words(numbers)}, found none")
            continue
        real = {"count": number(sums.count), "bytes": number(sums.total_bytes)}
        for name, value in numbers.items():
            if real[name] != value:
                wrong.append(
                    f"{op} over {axis}: expected {_words({name: value})}, found "
                    f"{_words({name: real[name]})}"
                )
    if no_others:
        wrong += [
            f"{op} over {axis}: expected none, found "
            f"{_words({'count': number(sums.count), 'bytes': number(sums.total_bytes)})}"
            for (op, axis), sums in found.items()
            if (op, axis) not in expected
        ]
    if wrong:
        raise AssertionError("per step and device\n" + "\n".join(wrong))


def assert_fits(report: Report, gib: float | None = None) -> None:
    """Asserts that a program's peak is at most `gib` GiB; None: what the GPU has to give.

    Raises AssertionError with the numbers, ValueError for emulated devices without `gib`.
    """
    if gib is None and report.memory.usable is None:
        raise ValueError(f"{report.target} has no memory of its own; give gib")
    limit = report.memory.usable if gib is None else gib * 2**30
    if report.memory.peak > limit:
        largest = "".join(
            f"\n{a.bytes / 2**30:.3f} GiB {a.shape} {a.name}" for a in report.memory.arrays[:5]
        )
        raise AssertionError(
            f"the program needs {report.memory.peak / 2**30:.3f} GiB of each device and may take "
            f"{limit / 2**30:.3f}, {(report.memory.peak - limit) / 2**30:.3f} less; largest"
            f"{largest or ': not known'}"
        )


def _words(numbers: Mapping) -> str:
    words = {"count": "{:,} executions", "bytes": "{:,} bytes"}
    parts = ["?" if v is None else words[name].format(v) for name, v in numbers.items()]
    return " of ".join(parts) or "some"
