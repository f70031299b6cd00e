"""Keeps the log lines of XLA and of its CUDA plugin off stderr, where they say nothing to a user.

The one idea: XLA writes to the file descriptor, not through Python, so the descriptor leads into a
filter while a command runs. The filter is a process of its own: the last words of a crash pass.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PLUGIN = r"WARNING: All log messages before absl.*|[IWE]\d{4} .* cudart_stub\.cc:\d+\] .*"
"""What the CUDA plugin logs on a machine without a driver."""

LOG = "|".join(
    (
        PLUGIN,
        r"[IWE]\d{4} [\d:.]+ +\d+ \S+:\d+\] .*",
        r"\*{9,}|.*Very slow compile\?.*|The operation took .*|",  # an alarm over several lines
    )
)
"""All that XLA logs but for what ends the process; an error that matters JAX raises as well."""

_FILTER = """import re, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
for line in sys.stdin:
    if not re.fullmatch(sys.argv[1], line.rstrip()):
        print(line, end="", file=sys.stderr, flush=True)
"""


@contextlib.contextmanager
def stderr_without(lines: str) -> Iterator[None]:
    """Leaves out lines of stderr that match a regular expression; everything else passes."""
    sys.stderr.flush()
    command = [sys.executable, "-S", "-E", "-c", _FILTER, lines]
    saved = os.dup(2)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as filtering:
        os.dup2(filtering.stdin.fileno(), 2)
        filtering.stdin.close()
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)


def without_plugin_lines():
    """A context for a command that runs on this machine: quiet about GPUs where there are none."""
    plugin = importlib.util.find_spec("jax_cuda12_plugin")
    if plugin is None or Path("/dev/nvidiactl").exists():
        return contextlib.nullcontext()
    return stderr_without(PLUGIN)
