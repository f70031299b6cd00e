"""The command line: every mistake is one sentence and exit code 2, and leaves nothing behind."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar import cli
from jaxpar.cli.train import parse, result_rows
from jaxpar.layout import Layout
from jaxpar.train import Result
from jaxpar.train_config import TrainConfig


@pytest.fixture(scope="module", autouse=True)
def started():
    """JAX runs on its 8 devices before any command can ask for another number."""
    assert jax.device_count() == 8


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with some files in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 300, 4], np.uint16))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "bad.toml").write_text("data = \n")
    (tmp_path / "axis.toml").write_text("tensr = 2\n")
    (tmp_path / "config.toml").write_text("stepz = 2\n")
    (tmp_path / "float.toml").write_text("steps = 2.5\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("")
    return tmp_path


TINY = "--steps 4 --global-batch 8 --seq-len 16"
"""Flags of a run of seconds."""


def contents(folder):
    return sorted(str(p) for p in folder.rglob("*"))


MISTAKES = {
    "no command": ("", "no command given; write jaxpar train"),
    "unknown command": ("trian", "no command 'trian'; did you mean 'train'?"),
    "unknown flag": ("train --stepz 3", "no flag --stepz; did you mean '--steps'?"),
    "flag without value": ("train --steps", "Missing value for argument '--steps'"),
    "config without value": ("train --config", "--config needs a value"),
    "wrong type": ("train --steps many", "Error parsing --steps: invalid literal for int()"),
    "stray word": ("train tiny", "Unrecognized options: tiny"),
    "wrong choice": ("train --schedule linear", "invalid choice 'linear' for argument"),
    "no steps": ("train --steps 0", "steps=0 is too small; use 1 or more"),
    "unknown layout": ("train --layout cpu8_data4_tensr2", "did you mean 'cpu8_data4_tensor2'?"),
    "missing layout": ("train --layout no/such.toml", "there is no layout file no/such.toml"),
    "layout is not TOML": ("train --layout ./bad.toml", "./bad.toml is not TOML"),
    "misspelt axis in a file": (
        "train --layout ./axis.toml",
        "no setting 'tensr'; did you mean 'tensor'?",
    ),
    "misspelt axis": ("train --set tensr=2", "no setting 'tensr'; did you mean 'tensor'?"),
    "misspelt value": ("train --set remat=blok", "did you mean 'block'?"),
    "no value": ("train --set tensor", "write key=value, such as tensor=2"),
    "too many devices": (
        "train --set data=8 --devices 8",
        "pipe=2 x data=8 x tensor=2 = 32 devices, found 8; the axis sizes must multiply to 8",
    ),
    "too few devices": (
        "train --set data=1 --devices 8",
        "pipe=2 x tensor=2 = 4 devices, found 8",
    ),
    "more devices than JAX started with": (
        "train --devices 16",
        "emulate_devices(16) came after JAX had started with 8 cpu device(s)",
    ),
    "batch does not divide": (
        "train --global-batch 7",
        "global_batch 7 is not a multiple of data 2; use 6 or 8",
    ),
    "batch does not divide into microbatches": (
        "train --global-batch 8 --set microbatches=3",
        "gives 4 rows to each of 2 device groups, which microbatches=3 does not divide",
    ),
    "sequence does not divide": (
        "train --seq-len 33",
        "seq_len 33 is not a multiple of tensor=2",
    ),
    "sequence too long": ("train --seq-len 40000", "seq_len 40000 is above the 32768"),
    "heads do not divide": (
        "train --model gpt2:124m --set tensor=8 --set data=1 --set pipe=1 --devices 8",
        "heads=12 does not split over tensor=8",
    ),
    "unknown family": ("train --model lama:tiny", "did you mean 'llama'? known: gpt2, llama"),
    "unknown preset": ("train --model llama:tinny", "did you mean 'tiny'? known: tiny, 1b, 3b"),
    "no preset": ("train --model llama", "names no preset; write llama:PRESET"),
    "missing data": ("train --data no/such", "data source no/such does not exist"),
    "empty folder": ("train --data empty", "folder empty has no files"),
    "empty file": ("train --data empty.txt", "empty.txt has no tokens"),
    "bad JSON line": ("train --data bad.jsonl", "bad.jsonl"),
    "token beyond the vocabulary": (
        "train --data tokens.npy",
        "token id 300 in document 1 of tokens.npy is outside vocab_size 256",
    ),
    "missing tokenizer": ("train --tokenizer no.json", '"no.json" does not exist'),
    "missing config": ("train --config no.toml", "there is no config no.toml"),
    "unknown key in the config": (
        "train --config config.toml",
        "config.toml sets 'stepz', which is not known; did you mean 'steps'?",
    ),
    "wrong type in the config": ("train --config float.toml", "steps=2.5 is not a whole number"),
    "used folder": ("train --out used", "out used exists and is not an empty folder"),
    "nothing to resume": ("train --resume used --config axis.toml", "axis.toml sets 'tensr'"),
    "no run to resume": ("train --resume nowhere", "there is no config nowhere/config.toml"),
    "tensorboard missing": ("train --tensorboard", "run pip install 'jaxpar[tensorboard]'"),
    "wandb missing": ("train --wandb", "run pip install 'jaxpar[wandb]'"),
    "schedule": ("schedule 1f2b", '"1f2b" is not known'),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_code_2_and_writes_nothing(
    name, folder, capsys, monkeypatch
):
    argv, words = MISTAKES[name]
    for package in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    before = contents(folder)
    assert cli.main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.startswith("jaxpar") and err.count("\n") == 1 and "Traceback" not in err
    assert out == ""
    assert contents(folder) == before


def raising(error):
    def main(argv):
        raise error

    return main


def test_an_interrupt_ends_with_code_130(monkeypatch, capsys):
    monkeypatch.setattr("jaxpar.cli.train.main", raising(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "jaxpar: interrupted\n"


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("a bug"), KeyError("a bug")])
def test_an_error_that_jaxpar_did_not_raise_keeps_its_traceback(error, monkeypatch):
    monkeypatch.setattr("jaxpar.cli.train.main", raising(error))
    with pytest.raises(type(error)):
        cli.main(["train"])


def test_an_error_of_the_system_is_a_sentence(folder, capsys):
    (folder / "file").write_text("")
    assert cli.main(["train", *TINY.split(), "--out", "file/run"]) == 2
    assert "file/run" in capsys.readouterr().err


def test_help_lists_the_commands_and_every_setting(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--model", "--layout", "--set", "--data", "--steps", "--global-batch", "--lr"):
        assert flag in text


def test_flags_come_on_top_of_a_config(folder):
    (folder / "run.toml").write_text(TrainConfig(steps=7, lr=0.5, set=("tensor=4",)).to_toml())
    assert parse(["--config", "run.toml"]) == TrainConfig(steps=7, lr=0.5, set=("tensor=4",))
    changed = parse(["--steps", "9", "--config=run.toml", "--wandb"])
    assert changed == TrainConfig(steps=9, lr=0.5, set=("tensor=4",), wandb=True)


def test_set_may_be_given_several_times():
    assert parse(["--set", "tensor=4", "--set=data=2"]).set == ("tensor=4", "data=2")


def test_a_real_run_from_the_shell_ends_with_a_table_and_leaves_its_folder(tmp_path):
    (tmp_path / "data").mkdir()
    for i in range(20):
        (tmp_path / "data" / f"{i}.txt").write_text("to be or not to be " * 20)
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    flags = [*TINY.split(), "--data", "data", "--name", "try"]
    run = subprocess.run([sys.executable, "-W", "error", "-m", "jaxpar", "train", *flags],
                         cwd=tmp_path, capture_output=True, text=True, timeout=300,
                         env=environment)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    for words in ("step 4/4  loss", "tokens/s", "held-out loss", "bits per byte",
                  "4 steps, runs/try", "loss, first and last", "memory per device", "compile time",
                  "pipe=2 data=2 tensor=2 zero=1 microbatches=2"):  # fmt: skip
        assert words in run.stdout
    assert {p.name for p in (tmp_path / "runs" / "try").iterdir()} == {
        "checkpoint", "config.toml", "layout.toml", "metrics.jsonl"}  # fmt: skip


def test_a_mistake_in_a_real_shell_has_code_2_and_no_traceback(tmp_path):
    run = subprocess.run([sys.executable, "-m", "jaxpar", "train", "--global-batch", "7"],
                         cwd=tmp_path, capture_output=True, text=True, timeout=100)  # fmt: skip
    assert run.returncode == 2
    assert run.stderr == "jaxpar train: global_batch 7 is not a multiple of data 2; use 6 or 8\n"
    assert list(tmp_path.iterdir()) == []


def test_the_table_names_mfu_and_skipped_steps_only_where_there_are_any():
    result = Result(
        folder=Path("runs/x"), layout=Layout(data=8), steps=5, loss_first=5.5, loss_last=math.nan,
        eval_loss=None, eval_bits_per_byte=None, tokens_per_s=1234.5, mfu=None, parameters=10,
        memory_per_device=3 * 2**20, compile_s=1.25, skipped=0,
    )  # fmt: skip
    rows = dict(result_rows(result))
    assert rows["loss, held out"] == "nothing was held out"
    assert rows["loss, first and last"] == "5.5000, nan"
    assert rows["memory per device"] == "3.0 MiB"
    assert "MFU" not in rows and "skipped steps" not in rows
    rows = dict(result_rows(dataclasses.replace(result, mfu=0.425, skipped=2)))
    assert rows["MFU"] == "42.5 %" and rows["skipped steps"].startswith("2")
