"""Configs of Hugging Face models: read and written exactly, or refused."""

import doctest
import json

import pytest

from jaxpar import families, interop
from jaxpar.models import gpt2, llama
from jaxpar.nn import RopeScaling

MODULES = {"llama": llama, "gpt2": gpt2}

# The published config.json files, without the keys that name tokens and files.
LLAMA_8B = dict(
    model_type="llama", attention_bias=False, attention_dropout=0.0, hidden_act="silu",
    hidden_size=4096, initializer_range=0.02, intermediate_size=14336,
    max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05, rope_theta=500000.0,
    rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192, rope_type="llama3"),
    tie_word_embeddings=False, vocab_size=128256,
)  # fmt: skip
GPT2_124M = dict(
    model_type="gpt2", activation_function="gelu_new", attn_pdrop=0.1, embd_pdrop=0.1,
    initializer_range=0.02, layer_norm_epsilon=1e-05, n_ctx=1024, n_embd=768, n_head=12,
    n_layer=12, n_positions=1024, resid_pdrop=0.1, vocab_size=50257,
)  # fmt: skip


def test_published_configs_are_the_presets():
    assert interop.config_from_hugging_face(LLAMA_8B) == llama.preset("8b")
    assert interop.config_from_hugging_face(GPT2_124M) == gpt2.preset("124m")


def test_old_and_new_names_of_the_rotary_settings_mean_the_same():
    new = {k: v for k, v in LLAMA_8B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA_8B["rope_scaling"] | {"rope_theta": 500000.0}
    assert interop.config_from_hugging_face(new) == llama.preset("8b")
    oldest = {k: v for k, v in LLAMA_8B["rope_scaling"].items() if k != "rope_type"}
    old = LLAMA_8B | {"rope_scaling": oldest | {"type": "llama3"}}
    assert interop.config_from_hugging_face(old) == llama.preset("8b")
    plain = new | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
    config = interop.config_from_hugging_face(plain)
    assert (config.rope_theta, config.rope_scaling) == (1000.0, None)


@pytest.mark.parametrize("family", MODULES)
def test_configs_survive_a_round_trip(family):
    configs = [MODULES[family].preset(name) for name in MODULES[family].PRESETS]
    if family == "llama":
        configs.append(llama.preset("tiny", qkv_bias=True, rope_scaling=RopeScaling(factor=3.0)))
    for config in configs:
        theirs = json.loads(json.dumps(interop.config_to_hugging_face(config, family)))
        assert interop.config_from_hugging_face(theirs) == config


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model_type="lama"), "model_type 'lama'; did you mean 'llama'"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'; jaxpar's llama computes hidden_act='silu'"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(quantization_config={"bits": 4}), "quantization_config="),
        (dict(vocab_size=None, hidden_size=None), "has no vocab_size, hidden_size"),
        (dict(num_attention_heads=24), "24 heads do not divide the 4096 features"),
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_type='linear'"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "without low_freq_factor"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    ],
)
def test_configs_that_would_give_other_numbers_are_refused(change, message):
    with pytest.raises(ValueError) as error:
        interop.config_from_hugging_face(LLAMA_8B | change)
    assert message in str(error.value)


def test_fields_that_transformers_lacks_are_refused():
    with pytest.raises(ValueError, match="qk_norm=True has no place in the config of llama"):
        interop.config_to_hugging_face(llama.preset("tiny", qk_norm=True), "llama")
    with pytest.raises(ValueError, match="num_kv_heads=4 has no place .* it would be 8; use 8"):
        interop.config_to_hugging_face(gpt2.preset("tiny", num_kv_heads=4), "gpt2")


def test_examples_in_docstrings_run():
    results = doctest.testmod(families)
    assert results.attempted and not results.failed
