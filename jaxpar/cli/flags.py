"""Flags: from a dataclass to a command line with tyro, its errors as one sentence."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import TypeVar

from jaxpar.layout import nearest

T = TypeVar("T")


def parse_flags(kind: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """An instance of the dataclass `kind`: every field is a flag, its docstring the help.

    Tuples take a flag per element. Raises ValueError for unknown flags, naming the nearest, and
    for values of the wrong type; SystemExit(0) after --help.
    """
    import tyro

    known = ["--help", "--config"]
    for field in dataclasses.fields(kind):
        known.append("--" + field.name.replace("_", "-"))
        if field.type in (bool, "bool"):
            known.append("--no-" + field.name.replace("_", "-"))
    for arg in argv:
        flag = arg.partition("=")[0].replace("_", "-")
        if arg.startswith("--") and flag not in known:
            raise ValueError(f"there is no flag {arg.partition('=')[0]}; {nearest(flag, known)}")
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(kind, args=list(argv), prog=prog, default=default,
                            config=(tyro.conf.UseAppendAction,))  # fmt: skip
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise ValueError(f"{_first_part(told.getvalue())}; see {prog} --help") from None


def _first_part(box: str) -> str:
    """The text of tyro's error box up to its first ruler or empty line, on one line."""
    lines = [line.strip("│ \t") for line in box.splitlines()[1:]]
    ends = [i for i, line in enumerate(lines) if not line or re.fullmatch("[─╰╯]+", line)]
    text = " ".join(lines[: ends[0] if ends else None]).rstrip(".")
    return re.sub(r"^Error parsing (?!--)\S+: ", "", text)
