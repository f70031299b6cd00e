"""The `jaxpar` command: one file per sub-command, each with `main(argv) -> exit code`.

The one idea: what a user can cause is an error that jaxpar itself raises, and ends as one sentence
on stderr with exit code 2; an error from anywhere else is a bug and keeps its traceback.
"""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a language model, on this machine's GPUs or on emulated devices",
    "compile": "compile for a cluster without having one: memory, what is sent, what overlaps",
    "schedule": "draw a pipeline schedule and say what it costs",
}
"""Sub-command -> what it does; its code is `jaxpar.cli.NAME.main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 2 after a sentence on stderr, or 130.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    jaxpar ...
    0
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("jaxpar: interrupted", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        if not for_users(error):
            raise
        command = f"jaxpar {argv[0]}" if argv and argv[0] in COMMANDS else "jaxpar"
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(argv: list[str]) -> int:
    from jaxpar import __version__
    from jaxpar.layout import nearest

    if argv[:1] in (["-h"], ["--help"]):
        print("usage: jaxpar COMMAND [options]; jaxpar COMMAND --help says more\n")
        print("\n".join(f"  {name:<10}{what}" for name, what in COMMANDS.items()))
        return 0
    if argv[:1] == ["--version"]:
        print(f"jaxpar {__version__}")
        return 0
    if not argv:
        raise ValueError(f"no command given; write jaxpar train, or one of {', '.join(COMMANDS)}")
    if argv[0] not in COMMANDS:
        raise ValueError(f"there is no command {argv[0]!r}; {nearest(argv[0], COMMANDS)}")
    return importlib.import_module(f"jaxpar.cli.{argv[0]}").main(argv[1:])


def for_users(error: BaseException) -> bool:
    """Whether an error tells users what to do: the system's, or one that jaxpar raised itself."""
    if isinstance(error, OSError):
        return True
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
    return module.partition(".")[0] == "jaxpar"
