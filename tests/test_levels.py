"""Imports only point up a list of levels, and importing starts nothing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LEVELS = [
    "layout layout_files chips pipeline.schedules pipeline.slots",
    "_jax_compat mesh dims zero",
    "nn loss pipeline parts splits placement functions batch region costs "
    "costs_blocks costs_pipeline costs_reads costs_memory",
    "plan report checks own pipeline.__init__",
    "checkpoint data metrics interop families",
    "cluster testing planner launch",
    "__init__ __version__ __main__ train train_config train_setup generate cli",
]
"""A module may import from its own line and from those above. A package stands for its modules."""

LEVEL_OF = {name: level for level, line in enumerate(LEVELS) for name in line.split()}
MODULES = {
    ".".join(("jaxpar", *path.relative_to(ROOT / "jaxpar").with_suffix("").parts)): path
    for path in sorted((ROOT / "jaxpar").rglob("*.py"))
}
MODEL_IMPORTS = {
    "jaxpar.nn", "jaxpar.dims", "jaxpar.loss", "jaxpar.models", "jaxpar.layout.nearest",
}  # fmt: skip
"""What a model's file may import from jaxpar; of `layout`, the function for error messages."""


def imports(path: Path) -> set[str]:
    """Full names of everything that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def level(name: str) -> int:
    """The level of a module or of something in one, by the longest name on the list."""
    words = name.removeprefix("jaxpar.").split(".")
    known = [".".join(words[:n]) for n in (2, 1) if ".".join(words[:n]) in LEVEL_OF]
    assert known, f"{name} has no level; add it to LEVELS"
    return LEVEL_OF[known[0]]


@pytest.mark.parametrize("module", MODULES)
def test_an_import_only_points_up_the_list(module):
    for name in imports(MODULES[module]):
        assert not name.startswith("jaxpar.models"), f"{module} imports {name}: load it by name"
        if name.startswith("jaxpar."):
            assert level(name) <= level(module), f"{module} imports {name}, which is further down"


@pytest.mark.parametrize("name", LEVELS[0].split())
def test_sizes_and_rules_need_no_jax(name):
    assert not [n for n in imports(MODULES[f"jaxpar.{name}"]) if n.split(".")[0] == "jax"]


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.stem)
def test_a_model_imports_only_layers_dims_and_loss(path):
    for name in imports(path):
        allowed = any(name == a or name.startswith(a + ".") for a in MODEL_IMPORTS)
        assert allowed or name.split(".")[0] != "jaxpar", f"{path.name} imports {name}"


def test_importing_every_module_starts_no_backend():
    names = [m.removesuffix(".__init__") for m in MODULES if not m.endswith("__main__")]
    models = [f"jaxpar.models.{p.stem}" for p in (ROOT / "models").glob("*.py")]
    code = (f"import importlib; [importlib.import_module(m) for m in {names + models}]; "
            "from jaxpar import _jax_compat; print(_jax_compat.backend_started())")  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert run.stdout == "False\n", run.stderr


PARTS = ".ci jaxpar models mesh_configs examples benchmarks docs tests pyproject.toml README.md"
HERE_ONLY = re.compile(
    r"(?<![\w.\-/:>})!])/(?:home|root|tmp|usr|opt|mnt|work|Users)/\w"  # a path of one machine
    r"|py" + r"pi\.org|pythonhosted|artifactory|index-url"  # a place to install from
)


def test_no_file_names_a_path_of_one_machine_or_a_package_index():
    for part in PARTS.split():
        for path in [ROOT / part, *(ROOT / part).rglob("*")]:
            text = path.suffix in {"", ".py", ".md", ".toml", ".txt", ".sh", ".sbatch", ".yaml"}
            if path.is_file() and text:
                found = HERE_ONLY.search(path.read_text())
                assert path == Path(__file__) or not found, f"{path}: {found}"
