"""The same comparisons as test_interop.py, live with `transformers` and torch: pytest -m parity."""

import json
import os

import jax
import numpy as np
import pytest
from golden import make_hf
from test_interop import Golden, logits_of, loss_of

from jaxpar import interop

pytestmark = pytest.mark.parity

SCALED = dict(rope_theta=5000.0, rope_scaling=make_hf.SCALED["rope_scaling"] | dict(factor=4.0))
LIVE = make_hf.CASES | {
    "llama_tied_bias_scaled": (
        "llama",
        make_hf.LLAMA | SCALED | dict(tie_word_embeddings=True, attention_bias=True),
    ),
    "llama_deep_one_kv_head": (
        "llama",
        make_hf.LLAMA | dict(num_hidden_layers=5, num_key_value_heads=1, vocab_size=101),
    ),
    "llama_wide_scaled": (
        "llama",
        make_hf.LLAMA | SCALED | dict(hidden_size=96, num_attention_heads=12,
                                      num_key_value_heads=4, intermediate_size=160),
    ),
    "gpt2_deep": ("gpt2", make_hf.CASES["gpt2"][1] | dict(n_layer=5, n_inner=None, vocab_size=101)),
    "gpt2_untied": ("gpt2", make_hf.CASES["gpt2"][1] | dict(tie_word_embeddings=False)),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Imports the libraries once, with no way to the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def theirs(name: str):
    """(model, tokens, labels, logits, loss) of a case."""
    family, config = LIVE[name]
    model = make_hf.make_model(family, config)
    tokens, labels = make_hf.make_batch(model.config.vocab_size)
    return model, tokens, labels, *make_hf.run_model(model, tokens, labels)


def ours(model, tensors=None):
    """The jaxpar model of a `transformers` model."""
    config = model.config.to_dict()
    tensors = make_hf.weights_of(model) if tensors is None else tensors
    mine = interop.config_from_hugging_face(config)
    return interop.from_hugging_face(tensors, mine, config["model_type"])


@pytest.mark.parametrize("case", LIVE)
def test_logits_and_loss_equal_those_of_transformers(case):
    model, tokens, labels, logits, loss = theirs(case)
    mine = ours(model)
    got, got_loss = logits_of(mine, tokens), loss_of(mine, tokens, labels)
    print(f"{case}: logits {np.abs(got - logits).max():.1e} of {np.abs(logits).max():.1f}, "
          f"loss {abs(got_loss - loss):.1e}")  # fmt: skip
    assert np.abs(got - logits).max() < 1e-4
    assert abs(got_loss - loss) < 1e-5


@pytest.mark.parametrize("case", make_hf.CASES)
def test_the_script_makes_the_golden_files(case):
    golden, again = Golden(case), make_hf.make_case(case)
    for name, value in golden.weights.items():
        np.testing.assert_array_equal(again[f"weights/{name}"], value)
    np.testing.assert_array_equal(again["tokens"], golden.tokens)
    assert np.abs(again["logits"] - golden.logits).max() < 1e-5
    assert abs(again["loss"] - golden.loss) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["llama_tied_scaled", "llama_bias", "gpt2"])
def test_sharded_files_that_transformers_saved_load(case, dtype, tmp_path):
    import torch

    model, *_ = theirs(case)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tensors = interop.load_safetensors_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    got = interop.to_hugging_face(
        interop.from_hugging_face(tensors, interop.config_from_hugging_face(config),
                                  config["model_type"])
    )  # fmt: skip
    want = make_hf.weights_of(model.float())
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("case", LIVE)
def test_transformers_loads_an_export_and_computes_the_same(case, tmp_path):
    import transformers
    from safetensors.numpy import save_file

    model, tokens, labels, logits, loss = theirs(case)
    mine, family = ours(model), model.config.model_type
    config = interop.config_to_hugging_face(mine.config, family)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(interop.to_hugging_face(mine), tmp_path / "model.safetensors", {"format": "pt"})
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values()), info
    got, got_loss = make_hf.run_model(again.eval(), tokens, labels)
    np.testing.assert_array_equal(got, logits)
    assert got_loss == loss


def test_a_state_dict_with_its_tied_head_loads():
    model, *_ = theirs("llama_tied_scaled")
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    assert "lm_head.weight" in tensors
    for a, b in zip(jax.tree.leaves(ours(model, tensors)), jax.tree.leaves(ours(model)),
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)


def test_a_lost_shard_and_several_files_without_index_are_refused(tmp_path):
    model, *_ = theirs("llama")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"has no {lost.name}, which model.safetensors.index.json"):
        interop.load_safetensors_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"must have one \*.safetensors file; found model-00001"):
        interop.load_safetensors_folder(tmp_path)
