"""What README, docs and headers of ready layouts say is so: commands, files, links, the loop."""

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import jax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar import cli, data
from jaxpar.batch import check_batch
from jaxpar.cli.train import parse
from jaxpar.models import llama
from jaxpar.train_config import DEFAULT_LAYOUT

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
FILES = sorted(ROOT.glob("mesh_configs/*.toml"))
TEST_COMMAND = "pip install -e '.[test]' && pytest"


def test_the_first_commands_are_there_and_ci_runs_the_tests_one():
    commands = re.findall(r"^    (pip install .*)$", README, re.MULTILINE)
    assert commands == ["pip install -e . && jaxpar train", TEST_COMMAND]
    assert f"{TEST_COMMAND} " in (ROOT / ".ci" / "run").read_text()


def test_the_loop_runs_as_written(tmp_path, monkeypatch):
    (loop,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert 20 <= len([line for line in loop.splitlines() if line.strip()]) <= 25
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "batches", functools.partial(data.batches, steps=2))
    names = {}
    exec(compile(loop, "README.md", "exec"), names)
    names["checkpoint"].close()
    assert names["i"] == 1 and names["layout"] == jp.load_layout(DEFAULT_LAYOUT)
    assert 4 < float(names["loss"]) < 6.5


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for name in re.findall(r"\b(?:examples|benchmarks|tests|docs)/[\w/]+\.(?:py|md)\b", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for name in re.findall(r"\btest_\w+", text):
        assert (ROOT / "tests" / f"{name}.py").exists(), f"{page.name} names {name}"
    for name in re.findall(r"\b(?:cpu8|gpu\d)_\w+", text):
        assert name in (*jp.layout_names(), "cpu8_"), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_and_their_flags_exist(page):
    for command in re.findall(r"(?:^    |`)jaxpar (\w+)", page.read_text(), re.MULTILINE):
        assert command in cli.COMMANDS
    for command, line in re.findall(r"^    jaxpar (\w+) (.*)$", page.read_text(), re.MULTILINE):
        flags = re.findall(r"(?<!\S)--[\w-]+", line.partition(" #")[0])
        assert set(flags) <= flags_of(command), f"{page.name}: {line}"


@functools.cache
def flags_of(command: str) -> set[str]:
    """The flags that a command's help names."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return set(re.findall(r"--[\w-]+", out.getvalue())) | {"--config"}


def test_every_folder_at_the_top_is_in_the_file_tree():
    tree = README.partition("## Files")[2]
    for folder in ("jaxpar", "models", "mesh_configs", "examples", "benchmarks", "docs", "tests"):
        assert f"    {folder}/ " in tree and (ROOT / folder).is_dir()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_ready_layout_says_its_goal_a_command_that_fits_and_what_was_measured(path):
    header = "".join(line[1:] for line in path.read_text().splitlines(True) if line[0] == "#")
    assert header.startswith(" Goal: ") and "\n Measured: " in header
    header = header.replace("\\\n", " ")
    command = re.search(r"^ Run:  (jaxpar train .*)$", header, re.MULTILINE)[1]
    config = parse(shlex.split(command)[2:])
    assert config.layout == path.stem
    rows = jax.ShapeDtypeStruct((config.global_batch, config.seq_len), "int32")
    check_batch(jp.load_layout(path), dict.fromkeys(("tokens", "targets", "weights"), rows))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_ready_layout_plans_the_small_model(path):
    layout = jp.load_layout(path)
    if layout.num_devices > 8:
        pytest.skip("more devices than are emulated here")

    def init(key):
        return llama.Llama(llama.tiny(), rngs=nnx.Rngs(key))

    plan = jp.make_plan(layout, init, devices=jax.devices()[: layout.num_devices])
    assert plan.layout == layout and "embedding.table" in str(plan)
