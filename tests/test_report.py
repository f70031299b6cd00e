"""What print(plan) shows: every array, its split, its bytes; what is sent; what looks unmeant."""

import dataclasses
import re

import jax
import optax
import pytest
from flax import nnx

import jaxpar as jp
from compiled import MODELS, model_shapes
from jaxpar import costs
from jaxpar.models import gpt2, llama
from jaxpar.report import warnings


def init(name, tx=None, **changes):
    module, config = MODELS[name]

    def make(key):
        model = module.Model(dataclasses.replace(config, **changes), rngs=nnx.Rngs(key))
        return model if tx is None else (model, tx.init(model))

    return make


def shown(text: str, array: str) -> list[str]:
    """The cells of an array's row."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [array]]
    return re.split(r"\s{2,}", line.strip())


def test_every_array_is_listed_with_its_split_and_bytes():
    plan = jp.make_plan(jp.Layout(data=2, tensor=4, zero=3), init("llama"))
    text = str(plan)
    for split, leaf in zip(plan.splits, jax.tree.leaves(plan.state), strict=True):
        cells = shown(text, split.path)
        assert cells[1] == " x ".join(map(str, leaf.shape))
        assert int(cells[4].replace(",", "")) == costs.state_bytes(plan)[split.path]
    assert shown(text, "embedding.table")[2:4] == ["float32", "vocab/tensor+data"]
    assert shown(text, "layers.attention.query.weight")[3] == "embed/data, heads/tensor"
    assert text.splitlines()[0].startswith("8 devices: data=2 tensor=4 | zero=3")


def test_what_stays_whole_is_padded_or_held_in_groups_is_said():
    plan = jp.make_plan(jp.Layout(data=2, tensor=4), init("llama_kv2", vocab_size=61))
    text = str(plan)
    assert shown(text, "embedding.table")[5].startswith("vocab 61 % 4: padded to 64")
    key = shown(text, "layers.attention.key.weight")
    assert key[5] == "kv_heads=2 held by groups of 2 of 4 tensor devices"
    plan = jp.make_plan(jp.Layout(data=8), init("gpt2", embed_dim=36))
    assert shown(str(plan), "norm.scale")[3:] == [
        "whole", "144", "whole on every device: no dim of (36,) divides by data=8",
    ]  # fmt: skip


def test_moments_that_follow_their_parameters_are_one_row():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    plan = jp.make_plan(jp.Layout(data=8), init("llama", tx))
    text = str(plan)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(plan.state[0]))
    for moment in ("mu", "nu"):
        (row,) = [line for line in text.splitlines() if f".{moment}.*" in line]
        cells = re.split(r"\s{2,}", row.strip())
        assert cells[1:] == ["12 arrays", "float32", "each like its parameter",
                             f"{4 * parameters // 8:,}"]  # fmt: skip
    assert shown(text, "embedding.table")  # named as in the model
    total = sum(costs.state_bytes(plan).values())
    assert f"{parameters:,} parameters" in text and f"{total:,} in all" in text


def test_factored_moments_are_listed_one_by_one():
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    plan = jp.make_plan(jp.Layout(data=8), init("gpt2", tx))
    (row,) = [line for line in str(plan).splitlines() if ".v_row.layers.mlp.up.weight" in line]
    assert "4 x 32" in row and "embed/data" in row and "one dim fewer" in row


def test_what_is_sent_is_what_the_formulas_say():
    layout = jp.Layout(data=2, tensor=4, zero=1, microbatches=2)
    text = str(jp.make_plan(layout, init("llama")))
    rows = costs.parameter_traffic(model_shapes("llama"), layout)
    gathers = [r for r in rows if r.op == "all-gather"]
    line = next(line for line in text.splitlines() if line.split()[:2] == ["data", "all-gather"])
    assert line.split()[2:] == ["12", f"{sum(r.total_bytes for r in gathers):,}",
                                f"{sum(r.wire_bytes for r in gathers):,}"]  # fmt: skip
    # 1,000 tokens x embed 32 x bf16, for 2 gathers in each of 4 blocks and each direction, 2 more
    activations = text[text.index("1,000 tokens") :]
    gather = next(line for line in activations.splitlines() if "all-gather" in line)
    assert gather.split()[2:4] == ["18", f"{18 * 1000 * 32 * 2:,}"]


def test_one_device_sends_nothing():
    text = str(jp.make_plan(jp.Layout(), init("gpt2"), devices=jax.devices()[:1]))
    assert "nothing is sent" in text and "warning" not in text


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(tensor=8), "zero=1 has no effect"),
        (dict(data=8, zero=3, microbatches=4), "gathers every block 8 times"),
        (dict(data=8, zero=2, microbatches=4), "reduces gradients 4 times"),
        (dict(replica=2, data=4, zero=0), "replica=2 with zero=0 is the same as a larger data"),
        (dict(tensor=8, zero=0, sequence_parallel=False), "tensor=8 without sequence_parallel"),
    ],
    ids=str,
)
def test_a_legal_but_poor_choice_is_warned_of(settings, words):
    (warning,) = warnings(jp.Layout(**settings))
    assert words in warning
    assert f"warning: {warning}" in str(jp.make_plan(jp.Layout(**settings), init("llama_kv2")))


@pytest.mark.parametrize(
    "settings",
    [dict(data=8), dict(data=8, zero=0), dict(data=8, zero=3),
     dict(data=4, tensor=2, microbatches=4)],
    ids=str,
)  # fmt: skip
def test_a_usual_layout_is_not_warned_of(settings):
    assert warnings(jp.Layout(**settings)) == []


@pytest.mark.parametrize(
    "module, name, parameters", [(llama, "8b", "8,030,261,248"), (gpt2, "124m", "124,439,808")]
)
def test_a_plan_of_a_large_model_is_printed_without_making_it(module, name, parameters):
    config = module.preset(name)
    text = str(jp.make_plan(jp.Layout(data=4, tensor=2, zero=3),
                            lambda key: module.Model(config, rngs=nnx.Rngs(key))))  # fmt: skip
    assert f"{parameters} parameters" in text
