"""Every example runs as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

EXAMPLES = sorted(Path(__file__).parent.parent.glob("examples/*.py"))
LAST = {
    "01_own_loop": "step 4: loss ",
    "02_own_pytree": "whole on every device: 0.count",
    "04_long_context": "attention on 8 devices agrees",
}
"""How the last line that an example prints begins; others must print something."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, tmp_path):
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    run = subprocess.run([sys.executable, "-W", "error", str(path)], cwd=tmp_path, text=True,
                         capture_output=True, timeout=300, env=environment)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-1].startswith(LAST.get(path.stem, ""))


def test_there_are_examples():
    assert {"01_own_loop", "02_own_pytree"} <= {path.stem for path in EXAMPLES}
