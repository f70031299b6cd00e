"""What a run leaves behind, that it can be repeated and resumed, and that it compiles once."""

import contextlib
import dataclasses
import json
import logging
import math
import re
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar import chips, data, train_setup
from jaxpar.metrics import read_metrics
from jaxpar.train import evaluation, make_folder, train, utilization
from jaxpar.train_config import DEFAULT_LAYOUT, TrainConfig, load_model, model_families
from jaxpar.train_setup import find_layout, prepare
from layouts import reference_loss

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def started():
    """JAX runs on its 8 devices before any config can ask for another number."""
    assert jax.device_count() == 8


@contextlib.contextmanager
def compilations():
    """The names of the functions that XLA compiles, or reads from its cache, inside."""
    names: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            found = re.search(r"Finished XLA compilation of jit\((\w+)\)", record.getMessage())
            names.extend(found.groups() if found else ())

    handler, logger = Handler(), logging.getLogger("jax._src.dispatch")
    passed_on = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.removeHandler(handler)
        logger.propagate = passed_on


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Forty short texts."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        text = f"number {i}: " + "the cat sat on the mat. " * (4 + i % 5)
        (folder / f"{i:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def config(texts):
    return TrainConfig(data=str(texts), steps=STEPS, global_batch=8, seq_len=16, lr=1e-2,
                       schedule="constant", warmup_steps=2, holdout=0.2, eval_every=3, devices=8,
                       checkpoint_every=4, layout=DEFAULT_LAYOUT)  # fmt: skip


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """(result, records shown, functions compiled) of one run."""
    shown = []
    folder = tmp_path_factory.mktemp("runs") / "first"
    with compilations() as names:
        result = train(dataclasses.replace(config, out=str(folder)), shown.append)
    return result, shown, names


def losses(folder):
    return [r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]


def test_a_run_leaves_metrics_config_layout_and_a_checkpoint(run):
    folder = run[0].folder
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoint", "config.toml", "layout.toml", "metrics.jsonl"]  # fmt: skip
    assert sorted(p.name for p in (folder / "checkpoint").iterdir()) == ["4", "6"]


def test_the_metrics_have_one_object_per_step_and_per_evaluation(run):
    lines = (run[0].folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    for record in steps:
        assert list(record) == ["step", "loss", "grad_norm", "grad_norm_clipped", "tokens", "lr",
                                "step_time_s", "skipped"]  # fmt: skip
        assert record["grad_norm_clipped"] == pytest.approx(min(record["grad_norm"], 1), rel=1e-5)
        assert 0 < record["tokens"] <= 8 * 16 and record["step_time_s"] > 0
        assert record["skipped"] == 0
    rates = [1e-2 / 3, 2e-2 / 3] + 4 * [1e-2]
    np.testing.assert_allclose([r["lr"] for r in steps], rates, rtol=1e-5)
    evals = [r for r in records if "eval_loss" in r]
    assert [r["step"] for r in evals] == [3, 6]
    for record in evals:
        assert record["eval_bits_per_byte"] == pytest.approx(record["eval_loss"] / math.log(2))


def test_the_result_and_what_is_shown_say_what_the_file_says(run):
    result, shown, _ = run
    records = read_metrics(result.folder / "metrics.jsonl")
    assert [r for r in shown if "note" not in r] == records
    assert result.steps == STEPS
    assert (result.loss_first, result.loss_last) == (losses(result.folder)[0], records[-2]["loss"])
    assert result.eval_loss == records[-1]["eval_loss"]
    assert result.layout == jp.load_layout(DEFAULT_LAYOUT)
    assert result.mfu is None and result.compile_s > 0
    assert result.parameters == 229_952


def test_the_loss_falls(run):
    assert run[0].loss_last < 0.8 * run[0].loss_first < 0.8 * 1.1 * math.log(256)


def test_memory_per_device_holds_the_state_it_must_hold(run):
    plan_bytes = 4 * run[0].parameters
    assert run[0].memory_per_device > plan_bytes / 2 + 2 * plan_bytes / 8


def test_the_step_and_the_evaluation_compile_once(run):
    _, _, names = run
    assert names.count("step") == 1
    assert names.count("function") == 1


def test_a_resumed_run_compiles_once_and_equals_the_unbroken_one(run, config, tmp_path):
    folder = tmp_path / "broken"
    train(dataclasses.replace(config, steps=4, out=str(folder)))
    with compilations() as names:
        result = train(dataclasses.replace(config, resume=str(folder)))
    assert names.count("step") == 1
    assert result.steps == STEPS
    assert losses(folder) == losses(run[0].folder)
    evals = [r["eval_loss"] for r in read_metrics(folder / "metrics.jsonl") if "eval_loss" in r]
    assert evals[-1] == run[0].eval_loss


def test_a_run_resumes_on_another_layout(run, config, tmp_path):
    folder = tmp_path / "broken"
    train(dataclasses.replace(config, steps=4, out=str(folder)))
    train(
        dataclasses.replace(
            config,
            resume=str(folder),
            set=("pipe=1", "data=8", "tensor=1", "zero=3", "microbatches=1"),
        )
    )
    np.testing.assert_allclose(losses(folder), losses(run[0].folder), rtol=1e-4)


def test_a_run_repeats_from_its_config_alone(run, tmp_path):
    config = TrainConfig.from_toml(run[0].folder / "config.toml", out=str(tmp_path / "again"))
    result = train(config)
    assert losses(result.folder) == losses(run[0].folder)
    assert result.eval_loss == run[0].eval_loss
    assert result.layout == run[0].layout


def test_every_held_out_token_is_evaluated_exactly_once(config):
    config = dataclasses.replace(config, eval_rows=0, global_batch=32)
    setup = prepare(config)
    model = setup.plan.init(jax.random.key(1))[0]
    got = evaluation(setup)(model)
    host = jax.tree.map(np.asarray, jax.device_get(model))
    batches = list(data.heldout_batches(
        setup.heldout, global_batch=32, seq_len=16, split="all"))  # fmt: skip
    counts = [batch["weights"].sum() for batch in batches]
    assert sum(counts) == setup.heldout.num_tokens - len(
        setup.heldout
    )  # a first one is not guessed
    want = sum(n * float(reference_loss(host, b)) for n, b in zip(counts, batches, strict=True))
    assert got == pytest.approx(want / sum(counts), rel=1e-5)


def test_eval_rows_caps_the_rows(config):
    few = prepare(dataclasses.replace(config, eval_rows=8))
    every = prepare(dataclasses.replace(config, eval_rows=0))
    model = few.plan.init(jax.random.key(1))[0]
    assert evaluation(few)(model) != evaluation(every)(model)


def test_a_run_without_held_out_documents_has_no_evaluation(config, tmp_path):
    (tmp_path / "one.txt").write_text("only one text " * 40)
    result = train(dataclasses.replace(config, data=str(tmp_path / "one.txt"), steps=3,
                                       out=str(tmp_path / "r")))  # fmt: skip
    assert result.eval_loss is None and result.eval_bits_per_byte is None


def test_a_loss_that_is_not_finite_ends_the_run_at_that_step(config, tmp_path):
    wild = dataclasses.replace(config, lr=1e38, out=str(tmp_path / "r"))
    with pytest.raises(RuntimeError, match=r"step 2: .* norm (nan|inf).*--skip-nonfinite"):
        train(wild)
    assert not (tmp_path / "r" / "checkpoint").exists()


def test_skipped_steps_are_counted(config, tmp_path):
    wild = dataclasses.replace(config, lr=1e38, skip_nonfinite=True, out=str(tmp_path / "r"))
    result = train(wild)
    assert result.skipped == STEPS - 1
    records = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [r["skipped"] for r in records if "loss" in r] == list(range(STEPS))
    assert records[1]["grad_norm"] is None  # JSON has no NaN


def test_utilization_is_model_flops_over_the_peak_of_all_devices(config, monkeypatch):
    setup = prepare(config)
    assert utilization(setup, 0.5) is None
    monkeypatch.setattr(chips, "chip_of", lambda kind: chips.chip("h100"))
    matrices = 4 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192) + 256 * 64
    attention = 12 * 4 * 64 * 16**2 // 2
    flops = 8 * (6 * matrices * 16 + attention)
    assert utilization(setup, 0.5) == pytest.approx(flops / 0.5 / (989.4e12 * 8), rel=1e-12)


def test_a_run_never_takes_the_folder_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [make_folder(TrainConfig(name="x")).as_posix() for _ in range(3)]
    assert made == ["runs/x", "runs/x-2", "runs/x-3"]
    assert make_folder(TrainConfig()).as_posix() == "runs/llama-tiny"


def test_the_schedule_rises_to_lr_and_falls_to_a_tenth():
    rate = TrainConfig(lr=1.0, steps=100, warmup_steps=9).optimizer()[1]
    np.testing.assert_allclose([rate(0), rate(9), rate(100)], [0.1, 1.0, 0.1], rtol=1e-5)
    half = 0.1 + 0.9 * (1 + math.cos(math.pi * 45 / 91)) / 2
    np.testing.assert_allclose(rate(9 + 45), half, rtol=1e-5)
    assert TrainConfig(steps=50).warmup == 5


def test_weight_decay_is_for_matrices_alone():
    tx, _ = TrainConfig(lr=0.1, warmup_steps=0, schedule="constant").optimizer()
    module, model_config = load_model("llama:tiny")
    shapes = jax.eval_shape(lambda: module.Model(model_config, rngs=nnx.Rngs(0)))
    model = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), shapes)
    zeros = jax.tree.map(np.zeros_like, model)
    updates, _ = tx.update(zeros, tx.init(model), model)
    assert not np.any(updates.layers.attention_norm.scale[...])
    np.testing.assert_allclose(updates.layers.mlp.up.weight[...], -0.01, rtol=1e-5)


def test_a_config_goes_to_toml_and_back(tmp_path):
    config = TrainConfig(steps=7, set=("tensor=4", "data=2"), wandb=True, lr=1)
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert TrainConfig.from_toml(tmp_path / "c.toml") == config
    assert "out" not in tomllib.loads(config.to_toml())


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(steps=0), "steps=0 is too small; use 1 or more"),
        (dict(steps=2.5), "steps=2.5 is not a whole number"),
        (dict(steps=True), "steps=True is not a whole number"),
        (dict(model=3), "model=3 is not a text"),
        (dict(lr=0), "lr=0.0 must be a number above 0"),
        (dict(lr=float("nan")), "lr=nan"),
        (dict(b2=1), "b2=1.0 must be at least 0 and below 1"),
        (dict(schedule="cosin"), "did you mean 'cosine'?"),
        (dict(set="tensor=4"), "not a list of texts"),
        (dict(steps=5, warmup_steps=5), "warmup_steps 5 leaves nothing of 5 steps"),
        (dict(out="a", resume="b"), "leave out `out`"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_value(values, words):
    with pytest.raises(ValueError) as error:
        TrainConfig(**values)
    assert words in str(error.value)


def test_model_families_are_the_modules_that_have_presets():
    assert {"gpt2", "llama"} <= set(model_families())
    assert "config" not in model_families()


def test_the_layout_follows_the_devices(monkeypatch):
    assert find_layout(TrainConfig()) == (jp.load_layout(DEFAULT_LAYOUT), 8)
    assert find_layout(TrainConfig(devices=2))[0] == jp.Layout(data=2)
    assert find_layout(TrainConfig(set=("data=1", "tensor=1")))[1] == 2
    changed, count = find_layout(TrainConfig(set=("data=-1", "tensor=4")))
    assert (changed.pipe, changed.data, changed.tensor, count) == (2, 1, 4, 8)
    monkeypatch.setattr(train_setup, "has_gpus", lambda: True)
    assert find_layout(TrainConfig()) == (jp.Layout(data=8), 8)
    assert find_layout(TrainConfig(set=("tensor=2",)))[0] == jp.Layout(data=4, tensor=2)


def test_a_config_with_devices_means_emulated_ones(monkeypatch):
    monkeypatch.setattr(train_setup, "has_gpus", lambda: True)
    assert find_layout(TrainConfig(devices=4)) == (jp.Layout(data=4), 4)


def test_importing_the_loop_and_the_command_starts_no_backend():
    code = ("import jaxpar.train, jaxpar.cli.train, jaxpar.zero; from jaxpar import _jax_compat; "
            "from jaxpar.train_setup import has_gpus; has_gpus(); "
            "print(_jax_compat.backend_started())")  # fmt: skip
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr


@pytest.mark.full
def test_the_default_run_reaches_three_and_a_half_bits_per_byte(tmp_path):
    result = train(TrainConfig(out=str(tmp_path / "run")))
    assert result.eval_bits_per_byte < 3.5
