"""metrics.jsonl: written late enough not to stop the devices, and early enough not to be lost."""

import json
import sys
import types

import numpy as np
import pytest

from jaxpar.metrics import MetricsLog, need, read_metrics, tensorboard_sink, wandb_sink


def values(loss=1.0, skipped=False):
    return {"loss": np.float32(loss), "tokens": np.float32(8), "grad_norm": np.float32(2.0),
            "grad_norm_clipped": np.float32(1.0), "skipped": np.bool_(skipped),
            "nonfinite": np.bool_(skipped)}  # fmt: skip


class Unfetched(dict):
    """Metrics of a step that is still running: who looks at them waits."""

    def __iter__(self):
        raise AssertionError("fetched before the next step was sent")

    keys = items = values = __iter__


def test_a_step_is_fetched_only_when_the_next_has_been_sent(tmp_path):
    with MetricsLog(tmp_path, lambda step: 0.5) as log:
        assert log.step(1, values(3.0)) is None
        assert log.step(2, Unfetched())["step"] == 1
        assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]
        with pytest.raises(AssertionError, match="fetched"):
            log.flush()


def test_every_line_is_on_disk_at_once_and_says_what_its_step_did(tmp_path):
    with MetricsLog(tmp_path, lambda step: [0.1, 0.2][step]) as log:
        log.step(1, values(3.0))
        log.step(2, values(2.0, skipped=True))
        log.flush()
        log.evaluation(2, 1.5, None)
        first, second, evaluation = read_metrics(tmp_path / "metrics.jsonl")
        assert log.flush() is None
    assert first.pop("step_time_s") > 0
    assert first == {"step": 1, "loss": 3.0, "grad_norm": 2.0, "grad_norm_clipped": 1.0,
                     "tokens": 8, "lr": 0.1, "skipped": 0}  # fmt: skip
    assert (second["lr"], second["skipped"]) == (0.2, 1)
    assert evaluation == {"step": 2, "eval_loss": 1.5, "eval_bits_per_byte": None}


def test_what_is_not_finite_is_null_since_json_has_no_nan(tmp_path):
    with MetricsLog(tmp_path, lambda step: 0.0) as log:
        log.step(1, values(np.nan))
        assert np.isnan(log.flush()["loss"])
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None


def test_a_resumed_log_drops_the_lines_after_its_start_and_half_lines(tmp_path):
    with MetricsLog(tmp_path, lambda step: 0.0) as log:
        for number in range(1, 6):
            log.step(number, values(skipped=number == 2))
        log.flush()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with MetricsLog(tmp_path, lambda step: 0.0, start=3) as log:
        log.step(4, values())
        log.flush()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert [r["skipped"] for r in records] == [0, 1, 1, 1]


def test_step_times_leave_out_what_happens_between_steps(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("jaxpar.metrics.time.perf_counter", lambda: now[0])
    with MetricsLog(tmp_path, lambda step: 0.0) as log:
        log.step(1, values())
        now[0] = 2.0
        assert log.flush()["step_time_s"] == 2.0
        now[0] = 100.0  # an evaluation
        log.step(2, values())
        now[0] = 101.0
        assert log.step(3, values())["step_time_s"] == 1.0
        now[0] = 104.0
        assert log.flush()["step_time_s"] == 3.0


def test_tensorboard_gets_every_number(tmp_path, monkeypatch):
    sent = []

    class SummaryWriter:
        def __init__(self, folder):
            sent.append(folder)

        def add_scalar(self, name, value, step):
            sent.append((name, value, step))

        def flush(self):
            sent.append("flush")

    monkeypatch.setitem(sys.modules, "tensorboardX",
                        types.SimpleNamespace(SummaryWriter=SummaryWriter))  # fmt: skip
    with MetricsLog(tmp_path, lambda step: 0.0, sinks=[tensorboard_sink(tmp_path / "tb")]) as log:
        log.evaluation(4, 1.5, None)
    assert sent == [str(tmp_path / "tb"), ("eval_loss", 1.5, 4), "flush"]


def test_wandb_gets_every_record_at_its_step(tmp_path, monkeypatch):
    sent = []

    def init(**settings):
        sent.append(settings["name"])
        return types.SimpleNamespace(log=lambda record, step: sent.append((record, step)))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with MetricsLog(tmp_path, lambda step: 0.0, sinks=[wandb_sink(tmp_path, "x", {})]) as log:
        log.evaluation(4, 2.0, None)
    assert sent == ["x", ({"eval_loss": 2.0, "eval_bits_per_byte": None}, 4)]


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_a_missing_package_is_a_sentence_that_says_what_to_install(extra, monkeypatch):
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(extra, extra), None)
    with pytest.raises(ValueError, match=rf"run pip install 'jaxpar\[{extra}\]'"):
        need(extra)
