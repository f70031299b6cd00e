"""jaxpar's Llama and GPT-2 compute what the models of `transformers` compute.

The golden files hold weights, tokens, logits and loss of `transformers`, made by
golden/make_hf.py; test_parity_live.py compares with the library itself.
"""

import dataclasses
import doctest
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden.make_hf import CASES

import jaxpar as jp
from jaxpar import interop
from jaxpar.models import gpt2, llama
from jaxpar.nn import rotary
from layouts import initial_state, model_init, reference_loss

MODULES = {"llama": llama, "gpt2": gpt2}


class Golden:
    """One golden file: config (a dict), weights by name, tokens, labels, logits, loss."""

    def __init__(self, name: str):
        arrays = np.load(Path(__file__).parent / "golden" / "hf" / f"{name}.npz")
        parts = {key: arrays[key] for key in arrays.files}
        self.config = json.loads(str(parts["config"]))
        self.family = self.config["model_type"]
        self.tokens, self.labels = parts["tokens"], parts["labels"]
        self.logits, self.loss = parts["logits"], float(parts["loss"])
        self.weights = {key.removeprefix("weights/"): value for key, value in parts.items()
                        if key.startswith("weights/")}  # fmt: skip

    def model(self, **changes):
        config = interop.config_from_hugging_face(self.config)
        config = dataclasses.replace(config, **changes)
        return interop.from_hugging_face(self.weights, config, self.family)


def logits_of(model, tokens) -> np.ndarray:
    """Logits [B, T, V] on one device, by plain calls."""

    def forward(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        batch = model.prepare({"tokens": tokens, "positions": positions})
        x = model.embed(batch)
        for i in range(jax.tree.leaves(model.layers)[0].shape[0]):
            x = model.block(jax.tree.map(lambda a, i=i: a[i], model.layers), x, batch)
        return model.logits(x, batch)

    return np.asarray(jax.jit(forward)(model, tokens))


def loss_batch(tokens, labels) -> dict:
    """A batch whose loss is theirs: each label is predicted from the token to its left."""
    targets = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], -100)], axis=1)
    weights = np.float32(targets != -100)
    return dict(tokens=tokens, targets=np.int32(np.where(weights, targets, 0)), weights=weights)


def loss_of(model, tokens, labels) -> float:
    return float(jax.jit(reference_loss)(model, loss_batch(tokens, labels)))


def interleaved(x, cos, sin):
    """The other order of rotary pairs: (x[2i], x[2i + 1])."""
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def to_interleaved(weights: dict, config: dict) -> dict:
    """The same model for the other order: rows of query and key moved, per head, biases too."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def move(name, value):
        count = heads.get(name.split(".")[-2])
        if count is None:
            return value
        halves = value.reshape(count, 2, -1, *value.shape[1:])
        return np.ascontiguousarray(np.swapaxes(halves, 1, 2)).reshape(value.shape)

    return {name: move(name, value) for name, value in weights.items()}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_loss_equal_those_of_transformers(case):
    golden = Golden(case)
    model = golden.model()
    logits = logits_of(model, golden.tokens)
    loss = loss_of(model, golden.tokens, golden.labels)
    print(f"{case}: logits {np.abs(logits - golden.logits).max():.1e} of "
          f"{np.abs(golden.logits).max():.1f}, loss {abs(loss - golden.loss):.1e}")  # fmt: skip
    assert np.abs(logits - golden.logits).max() < 1e-4
    assert abs(loss - golden.loss) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_loss_on_a_mesh_equals_that_of_transformers(case):
    golden = Golden(case)
    model = golden.model()
    layout = jp.Layout(data=2, tensor=4, zero=3, precision="fp32")
    plan = jp.make_plan(layout, lambda key: model, devices=jax.devices()[:8])
    placed = jax.device_put(plan.stored(model), plan.shardings)
    loss_fn = jax.jit(plan.loss(MODULES[golden.family].loss))
    total, count = loss_fn(placed, loss_batch(golden.tokens, golden.labels))
    assert count == (golden.labels[:, 1:] != -100).sum()
    assert abs(float(total / count) - golden.loss) < 1e-5


@pytest.mark.parametrize("case", ["llama_bias", "llama_tied_scaled"])
def test_the_other_rotary_order_gives_other_logits(case, monkeypatch):
    golden = Golden(case)
    config = interop.config_from_hugging_face(golden.config)
    monkeypatch.setattr(rotary, "rotate", interleaved)
    difference = np.abs(logits_of(golden.model(), golden.tokens) - golden.logits)
    assert difference[:, 0].max() < 1e-4, "position 0 is not rotated"
    assert difference[:, 1:].max() > 1e-1
    moved = to_interleaved(golden.weights, golden.config)
    model = interop.from_hugging_face(moved, config, "llama")
    assert np.abs(logits_of(model, golden.tokens) - golden.logits).max() < 1e-4


def test_the_golden_rotary_scaling_changes_the_logits():
    golden = Golden("llama_tied_scaled")
    plain = logits_of(golden.model(rope_scaling=None), golden.tokens)
    assert np.abs(plain - golden.logits).max() > 1e-1


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_keeps_every_bit(case):
    golden = Golden(case)
    tensors = interop.to_hugging_face(golden.model())
    assert tensors.keys() == golden.weights.keys()
    for name, value in golden.weights.items():
        assert (tensors[name].dtype, tensors[name].shape) == (value.dtype, value.shape), name
        assert tensors[name].tobytes() == value.tobytes(), name


def test_export_from_an_interleaved_pipeline_keeps_every_bit():
    model = initial_state("llama_kv2")[0]
    want = interop.to_hugging_face(model)
    layout = jp.Layout(pipe=2, tensor=2, schedule="interleaved", chunks=2, microbatches=2)
    plan = jp.make_plan(layout, model_init("llama_kv2"), devices=jax.devices()[:4])
    loaded = interop.load_hugging_face(jax.eval_shape(model_init("llama_kv2"), jax.random.key(0)),
                                       want)  # fmt: skip
    state = jax.device_put(plan.stored(loaded), plan.shardings)
    stored = np.asarray(state.layers.mlp_norm.scale[...])
    assert not np.array_equal(stored, model.layers.mlp_norm.scale[...]), "layers are not moved"
    got = interop.to_hugging_face(plan.canonical(state))
    assert got.keys() == want.keys()
    assert all(got[name].tobytes() == want[name].tobytes() for name in want)


def test_a_decoder_without_prefix_and_with_mask_buffers_loads():
    golden = Golden("gpt2")
    short = {name.removeprefix("transformer."): value for name, value in golden.weights.items()}
    short["h.0.attn.bias"] = np.ones((1, 1, 32, 32), bool)
    config = interop.config_from_hugging_face(golden.config)
    model = interop.from_hugging_face(short, config, "gpt2")
    got = interop.to_hugging_face(model)
    assert all(np.array_equal(got[name], value) for name, value in golden.weights.items())


def test_a_tied_head_in_the_file_must_equal_the_embedding():
    golden = Golden("llama_tied_scaled")
    model = golden.model()
    head = golden.weights["model.embed_tokens.weight"]
    interop.load_hugging_face(model, golden.weights | {"lm_head.weight": head.copy()})
    with pytest.raises(ValueError, match="lm_head.weight: differs from model.embed_tokens.weight"):
        interop.load_hugging_face(model, golden.weights | {"lm_head.weight": head + 1})


def test_half_precision_tensors_load_exactly_and_integers_are_refused():
    golden = Golden("gpt2")
    model = golden.model()
    for dtype in (jnp.bfloat16, np.float16):
        halves = {name: value.astype(dtype) for name, value in golden.weights.items()}
        got = interop.to_hugging_face(interop.load_hugging_face(model, halves))
        for name, value in halves.items():
            assert got[name].dtype == np.float32
            np.testing.assert_array_equal(got[name], value.astype(np.float32))
    wrong = golden.weights | {"transformer.wpe.weight": np.ones((32, 32), np.int8)}
    with pytest.raises(ValueError, match="transformer.wpe.weight is of type int8; fp32 holds"):
        interop.load_hugging_face(model, wrong)


def test_one_error_lists_misshapen_missing_and_unexpected_tensors():
    golden = Golden("llama")
    model = golden.model()
    tensors = dict(golden.weights)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].T
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    with pytest.raises(ValueError) as error:
        interop.load_hugging_face(model, tensors)
    assert str(error.value) == (
        "the tensors do not fit the model: model.norm.weight -> norm.scale: missing, expected [32];"
        " model.layers.1.self_attn.k_proj.weight -> layers.attention.key.weight of layer 1: found "
        "[32, 16], expected [16, 32]; model.layers.2.mlp.up_proj.weight: found [48, 32], expected "
        "nothing; make the model from the config.json that belongs to them"
    )


def test_a_wrong_number_of_kv_heads_names_both_shapes_in_every_layer():
    golden = Golden("llama_bias")
    with pytest.raises(ValueError) as error:
        golden.model(num_kv_heads=4)
    for layer in range(2):
        for leaf in ("k_proj.weight", "v_proj.weight"):
            assert f"model.layers.{layer}.self_attn.{leaf} -> " in str(error.value)
    assert "found [16, 32], expected [32, 32]" in str(error.value)
    assert "found [16], expected [32]" in str(error.value)


def test_shapes_are_compared_before_any_number_is_read():
    class Unread:
        shape = (3, 3)

        def __array__(self, dtype=None, copy=None):
            raise AssertionError("read")

    golden = Golden("gpt2")
    with pytest.raises(ValueError, match=r"found \[3, 3\], expected \[64, 32\]"):
        interop.load_hugging_face(golden.model(), dict.fromkeys(golden.weights, Unread()))


def test_an_output_bias_other_than_zero_is_refused():
    golden = Golden("llama_bias")
    name = "model.layers.1.self_attn.o_proj.bias"
    tensors = golden.weights | {name: np.full(32, 0.1, np.float32)}
    config = interop.config_from_hugging_face(golden.config)
    with pytest.raises(ValueError, match=f"{name}: a bias that is not 0"):
        interop.from_hugging_face(tensors, config, "llama")


def test_parameters_that_transformers_lacks_are_refused():
    config = llama.preset("tiny", qk_norm=True)
    model = jax.eval_shape(lambda key: llama.Model(config, rngs=nnx.Rngs(key)),
                           jax.random.key(0))  # fmt: skip
    with pytest.raises(
        ValueError, match="LlamaForCausalLM of transformers has no layers.attention"
    ):
        interop.to_hugging_face(model)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM of transformers has no layers.attention"
    ):
        interop.load_hugging_face(model, {})


def test_a_missing_safetensors_library_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="not installed; run pip install safetensors"):
        interop.load_safetensors_folder(tmp_path)


def test_a_family_without_a_table_is_refused():
    with pytest.raises(ValueError, match="there is no family 'falcon'; known: llama, gpt2"):
        interop.from_hugging_face({}, llama.tiny(), "falcon")


def test_examples_in_docstrings_run():
    results = doctest.testmod(interop)
    assert results.attempted and not results.failed


def test_examples_of_the_page_run():
    page = Path(__file__).parents[1] / "docs" / "hugging_face.md"
    results = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert results.attempted and not results.failed
