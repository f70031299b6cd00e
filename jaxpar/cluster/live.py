"""Which arrays a compiled program holds when it needs the most memory, read from XLA's dump.

The one idea: XLA writes down where every temporary value lies and from which instruction to which
it lives. The moment at which the most bytes lie at once is the peak, and what lies there then is
what has to become smaller.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)")
_VALUE = re.compile(r"^ value: <\d+ (.+?) @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_LIVE = re.compile(r"^\s+(\S+):(\d+)-(\d+)$")


class Value(NamedTuple):
    """A temporary value: the instruction that makes it, its shape, and where it lies, in bytes."""

    name: str
    shape: str
    bytes: int
    offset: int


def dump_options(folder: str | Path) -> dict[str, str | bool]:
    """XLA's options for a compile that writes the dump into `folder`."""
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_emitter_re": f"none in {folder}",  # nothing; keeps compile caches from a hit
    }


def live_values(folder: str | Path) -> list[Value]:
    """The temporary values that are live at the peak, largest first; [] where XLA wrote no dump.

    Where several share a place, the one that is live counts, once.
    """
    buffers = next(Path(folder).glob("*after_optimizations-buffer-assignment.txt"), None)
    ranges = next(Path(folder).glob("*after_optimizations-live-range.txt"), None)
    if buffers is None or ranges is None:
        return []
    return at_peak(buffers.read_text(encoding="utf-8"), ranges.read_text(encoding="utf-8"))


def at_peak(buffers: str, ranges: str) -> list[Value]:
    """The same from the two files' texts."""
    lives = _live_ranges(ranges)
    values = [(v, *lives[v.name]) for v in _temporaries(buffers) if v.name in lives]
    if not values:
        return []
    starts = sorted({start for _, start, _ in values})  # bytes only grow where something starts
    moments = (_lying([v for v, start, end in values if start <= t <= end]) for t in starts)
    _, best = max(moments, key=lambda lying: lying[0])
    return sorted(best, key=lambda v: -v.bytes)


def _temporaries(buffers: str) -> Iterator[Value]:
    """The values of the allocation that XLA reserves for temporaries."""
    inside = False
    for line in buffers.splitlines():
        if found := _ALLOCATION.match(line):
            inside = "preallocated-temp" in found[2]
        elif inside and (found := _VALUE.match(line)):
            name = found[1].replace(" (phi)", "").strip()
            name = name if name.endswith("}") else name + "{}"
            yield Value(name, found[4].partition("{")[0], int(found[2]), int(found[3]))
        elif line.startswith("Total bytes used"):
            return


def _live_ranges(ranges: str) -> dict[str, tuple[int, int]]:
    """Value -> (first, last) instruction, by their numbers in the schedule."""
    found, inside = {}, False
    for line in ranges.splitlines():
        if "BufferLiveRange" in line:
            inside = True
        elif "Live ranges at" in line:
            break
        elif inside and (live := _LIVE.match(line)):
            found[live[1]] = (int(live[2]), int(live[3]))
    return found


def _lying(values: list[Value]) -> tuple[int, list[Value]]:
    """(bytes that are taken, one value for each place): what lies inside another is the same."""
    kept, end, taken = [], 0, 0
    for value in sorted(values, key=lambda v: (v.offset, -v.bytes)):
        last = value.offset + value.bytes
        if last > end:
            kept.append(value)
            taken += last - max(end, value.offset)
            end = last
    return taken, kept
