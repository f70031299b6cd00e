"""`jaxpar compile`: tables, JSON, exit codes, and one sentence for every mistake."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from jaxpar import cli
from jaxpar.cli.compile import gpu_of
from jaxpar.cluster import compiler, target
from jaxpar.cluster import report as report_module
from jaxpar.layout import Layout

TINY = "--model llama:tiny --layout ./tiny.toml --seq-len 128"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with layouts in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text("data = 4\ntensor = 2\n")
    (tmp_path / "b200x8.toml").write_text("data = -1\n")
    (tmp_path / "six.toml").write_text("data = 6\n")
    return tmp_path


def run(argv, capsys):
    """(exit code, stdout, stderr)"""
    code = cli.main(["compile", *argv.split()])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def reports():
    """Layout -> its report, of all tests here that use the same target."""
    return {}


@pytest.fixture
def once(monkeypatch, reports):
    """Programs are compiled once for all tests here."""
    real = compiler.compile

    def compile(plan, *args, **settings):
        if plan.layout not in reports:
            reports[plan.layout] = real(plan, *args, **settings)
        return reports[plan.layout]

    monkeypatch.setattr(compiler, "compile", compile)


def test_a_program_that_fits_ends_with_0_and_shows_tables(folder, once, capsys):
    code, out, err = run(f"{TINY} --nodes 2 --gpus-per-node 4", capsys)
    assert (code, err) == (0, "")
    for words in ("compiling llama:tiny for 8 x h100-80gb in 2 nodes of 4 (no --gpu given",
                  "data=4 tensor=2", "4 rows of 128 tokens", "peak", "it fits", "reduce-scatter",
                  "overlap", "operations per device and step"):  # fmt: skip
        assert words in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100


def test_json_is_one_object_and_nothing_else(folder, once, capsys):
    code, out, err = run(f"{TINY} --nodes 2 --gpus-per-node 4 --json", capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == ["fits", "memory", "flops", "collectives", "overlap", "warnings",
                           "compile_seconds"]  # fmt: skip
    assert found["fits"] is True and found["memory"]["device"] == 84_942_979_072
    assert {"op", "axis", "count", "bytes", "total_bytes", "crosses_nodes"} == set(
        found["collectives"][0]
    )


def test_the_program_can_be_kept(folder, once, capsys):
    assert run(f"{TINY} --nodes 2 --gpus-per-node 4 --hlo out.txt", capsys)[0] == 0
    assert (folder / "out.txt").read_text().startswith("HloModule")


def test_what_does_not_fit_ends_with_3_and_names_settings_that_were_compiled(
    folder, once, reports, capsys, monkeypatch
):
    flags = f"{TINY} --nodes 2 --gpus-per-node 4"
    assert run(flags, capsys)[0] == 0
    memory = reports[Layout(data=4, tensor=2)].memory
    monkeypatch.setattr(report_module, "USABLE", (memory.peak - 0.5) / memory.device)
    code, out, err = run(flags, capsys)
    assert (code, err) == (3, "")
    assert "does not fit: 1 B more than a device has to give\ntrying settings" in out
    table = out.split("it fits with\n")[1]
    assert "--set remat=block" in table
    tried = [line for line in out.splitlines() if line.startswith("  --set")]
    assert tried and all(line.endswith(("fits", "does not fit")) for line in tried)


def test_where_the_state_alone_is_too_large_the_devices_it_needs_are_told(
    folder, once, capsys, monkeypatch
):
    monkeypatch.setattr(report_module, "USABLE", 1e-6)
    code, out, err = run(f"{TINY} --nodes 2 --gpus-per-node 4", capsys)
    assert (code, err) == (3, "")
    # 229,952 parameters with two moments in fp32, and the number of the step
    state, usable = 12 * 229_952 + 8, int(1e-6 * 84_942_979_072)
    assert "no layout of 8 devices can fit: parameters and optimizer state alone" in out
    assert f"use {-(-state // usable)} devices or more" in out
    assert "--set" not in out


def test_what_does_not_fit_says_so_in_json_too(folder, once, capsys, monkeypatch):
    monkeypatch.setattr(report_module, "USABLE", 1e-6)
    code, out, err = run(f"{TINY} --nodes 2 --gpus-per-node 4 --json", capsys)
    assert code == 3 and json.loads(out)["fits"] is False
    assert err.startswith("jaxpar compile: does not fit: ") and err.count("\n") == 1


def test_emulated_devices_are_a_target_too(folder, capsys):
    code, out, err = run(f"{TINY} --target cpu --set precision=fp32 --json", capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["fits"] is None and found["memory"]["device"] is None


def test_the_gpu_is_the_one_in_the_layouts_name_else_an_h100(folder):
    assert gpu_of("./b200x8.toml") == "b200-180gb"
    assert gpu_of("h100x512") == gpu_of("data8") + "-80gb" == "h100-80gb"
    assert gpu_of("a100-40gb_x8") == "a100-40gb" and gpu_of("a100x8") == "a100-80gb"


MISTAKES = {
    "no model": ("--layout tiny.toml", "no model given; write --model"),
    "no layout": ("--model llama:tiny", "no layout given; write --layout"),
    "unknown model": ("--model llama:tinny --layout ./tiny.toml", "did you mean 'tiny'?"),
    "unknown layout": ("--model llama:tiny --layout cpu8_data9", "did you mean 'cpu8_data8'?"),
    "unknown flag": (f"{TINY} --gpus 8", "no flag --gpus; did you mean '--gpu'?"),
    "unknown GPU": (f"{TINY} --gpu h1000", "no GPU 'h1000' in the table; did you mean 'h100-80gb'"),
    "a GPU for emulated devices": (
        f"{TINY} --target cpu --gpu h100",
        "gpu h100 has no meaning with target cpu",
    ),
    "unknown target": (f"{TINY} --target tpu", "invalid choice 'tpu' for argument '--target'"),
    "unknown setting": (f"{TINY} --set tensr=2", "no setting 'tensr'; did you mean 'tensor'?"),
    "too many nodes": (
        f"{TINY} --nodes 2",
        "layout ./tiny.toml has 8 devices, and nodes=2 of gpus_per_node=8 make 16",
    ),
    "nodes that do not make it up": (
        f"{TINY} --gpus-per-node 3",
        "layout ./tiny.toml has 8 devices, which nodes of 3 do not make up",
    ),
    "no nodes": (f"{TINY} --nodes -1", "nodes=-1 is not a size"),
    "an open axis": (
        "--model llama:tiny --layout ./b200x8.toml",
        "takes the devices that are left; say how many with --nodes",
    ),
    "a batch that does not divide": (
        f"{TINY} --global-batch 7",
        "global_batch 7 is not a multiple of data 4; use 4 or 8",
    ),
    "no rows": (f"{TINY} --global-batch -4", "global_batch=-4 is too small; use 1 or more"),
    "a sequence that does not divide": (f"{TINY} --seq-len 33", "not a multiple of tensor=2"),
    "a sequence too long": (f"{TINY} --seq-len 40000", "seq_len 40000 is above the 32768"),
    "a tensor group on several nodes": (
        f"{TINY} --gpus-per-node 1",
        "tensor=2 puts one group of devices on several hosts",
    ),
    "heads that do not divide": (
        "--model gpt2:124m --layout ./six.toml --set data=1 --set tensor=8 --seq-len 64",
        "heads=12 does not split over tensor=8",
    ),
    "a file in no folder": (f"{TINY} --hlo no/out.txt", "is in a folder that does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_code_2_and_no_other_output(name, folder, capsys):
    argv, words = MISTAKES[name]
    code, out, err = run(argv, capsys)
    assert words in err
    assert code == 2 and out == ""
    assert err.startswith("jaxpar compile: ") and err.count("\n") == 1
    assert sorted(p.name for p in folder.iterdir()) == ["b200x8.toml", "six.toml", "tiny.toml"]


def test_without_the_plugin_one_sentence_says_what_to_install(folder, capsys, monkeypatch):
    real = importlib.util.find_spec
    hide = lambda name, *a: None if name in target.PLUGINS else real(name, *a)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    code, out, err = run(f"{TINY} --gpu h200 --nodes 4 --gpus-per-node 2", capsys)
    assert (code, out) == (2, "")
    assert "run pip install 'jaxpar[cluster]'" in err and err.count("\n") == 1


def test_in_a_real_shell_nothing_but_the_object_is_printed(folder):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-W", "error", "-m", "jaxpar", "compile", *TINY.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["fits"] is True
