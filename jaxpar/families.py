"""What Hugging Face calls the tensors and config keys of our model families: Llama and GPT-2.

The one idea: a table per family, one row per tensor of their files. A row names the parameters
that the tensor holds and says which of its dims are inputs; everything else follows from shapes.
`jaxpar.interop` moves the weights by these tables.
"""

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any

from jaxpar.layout import nearest
from jaxpar.nn import RopeScaling

REQUIRED = object()
"""The default of a config key that has none."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A tensor of theirs, `{}` for the layer, and the parameters of ours that it joins.

    `kind`: "same" shape; "columns", a product's weight [in, *out] or bias [*out]; "rows", its
    weight [*in, out]. Several parameters lie side by side along the outputs.
    """

    name: str
    params: tuple[str, ...]
    kind: str = "same"

    def flat(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One parameter's shape, without layers, with inputs and outputs each as one dim."""
        if self.kind == "same":
            return shape
        if self.name.endswith("bias"):
            return (math.prod(shape),)
        inputs = 1 if self.kind == "columns" else len(shape) - 1
        return math.prod(shape[:inputs]), math.prod(shape[inputs:])


@dataclasses.dataclass(frozen=True)
class Family:
    """What `transformers` calls a model's tensors and the keys of its config.json.

    `prefix`: what some files leave off all names but lm_head. `outputs_first`: weights of products
    are [out, in]. `zeros`: a bias of theirs that our model may lack -> the parameter with which
    they have it. `buffers`: ends of names that hold no weights. `fields`: ours -> (theirs,
    default; None is computed). `fixed`: keys with the values our model computes, the one to write
    first. `unused`: fields of ours that the model does not look at.
    """

    architecture: str
    prefix: str
    outputs_first: bool
    rows: tuple[Row, ...]
    zeros: Mapping[str, str]
    buffers: tuple[str, ...]
    fields: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, tuple]
    unused: tuple[str, ...] = ()


def _rows(prefix: str, *rows) -> tuple[Row, ...]:
    return tuple(
        Row(f"{prefix}{name}", tuple(params.split()), *kind) for name, params, *kind in rows
    )


def _linear(prefix: str, theirs: str, ours: str, kind: str = "columns") -> tuple[Row, ...]:
    """The weight and, where the model has one, the bias of a product."""
    params = lambda leaf: tuple(f"layers.{p}.{leaf}" for p in ours.split())  # noqa: E731
    bias = "same" if kind == "rows" else kind
    return (
        Row(f"{prefix}{theirs}.weight", params("weight"), kind),
        Row(f"{prefix}{theirs}.bias", params("bias"), bias),
    )


_LAYER = "model.layers.{}."
LLAMA = Family(
    architecture="LlamaForCausalLM",
    prefix="model.",
    outputs_first=True,
    rows=(
        *_rows("model.", ("embed_tokens.weight", "embedding.table"), ("norm.weight", "norm.scale")),
        *_rows(
            _LAYER,
            ("input_layernorm.weight", "layers.attention_norm.scale"),
            ("post_attention_layernorm.weight", "layers.mlp_norm.scale"),
        ),
        *_linear(_LAYER, "self_attn.q_proj", "attention.query"),
        *_linear(_LAYER, "self_attn.k_proj", "attention.key"),
        *_linear(_LAYER, "self_attn.v_proj", "attention.value"),
        *_linear(_LAYER, "self_attn.o_proj", "attention.out", "rows"),
        *_linear(_LAYER, "mlp.gate_proj", "mlp.gate"),
        *_linear(_LAYER, "mlp.up_proj", "mlp.up"),
        *_linear(_LAYER, "mlp.down_proj", "mlp.down", "rows"),
        Row("lm_head.weight", ("head.table",)),
    ),
    zeros={"layers.attention.out.bias": "layers.attention.query.bias"},
    buffers=("rotary_emb.inv_freq",),
    fields={
        "vocab_size": ("vocab_size", REQUIRED),
        "num_layers": ("num_hidden_layers", REQUIRED),
        "embed_dim": ("hidden_size", REQUIRED),
        "num_heads": ("num_attention_heads", REQUIRED),
        "num_kv_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "ffn_dim": ("intermediate_size", REQUIRED),
        "max_seq_len": ("max_position_embeddings", 2048),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "tie_embeddings": ("tie_word_embeddings", False),
        "qkv_bias": ("attention_bias", False),
    },
    fixed={"hidden_act": ("silu", "swish"), "mlp_bias": (False,), "quantization_config": (None,)},
)

_LAYER = "transformer.h.{}."
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    outputs_first=False,
    rows=(
        *_rows(
            "transformer.",
            ("wte.weight", "embedding.table"),
            ("wpe.weight", "positions"),
            ("ln_f.weight", "norm.scale"),
            ("ln_f.bias", "norm.bias"),
        ),
        *_rows(
            _LAYER,
            ("ln_1.weight", "layers.attention_norm.scale"),
            ("ln_1.bias", "layers.attention_norm.bias"),
            ("ln_2.weight", "layers.mlp_norm.scale"),
            ("ln_2.bias", "layers.mlp_norm.bias"),
        ),
        *_linear(_LAYER, "attn.c_attn", "attention.query attention.key attention.value"),
        *_linear(_LAYER, "attn.c_proj", "attention.out", "rows"),
        *_linear(_LAYER, "mlp.c_fc", "mlp.up"),
        *_linear(_LAYER, "mlp.c_proj", "mlp.down", "rows"),
        Row("lm_head.weight", ("head.table",)),
    ),
    zeros={},
    buffers=(".attn.bias", ".attn.masked_bias"),
    fields={
        "vocab_size": ("vocab_size", REQUIRED),
        "num_layers": ("n_layer", REQUIRED),
        "embed_dim": ("n_embd", REQUIRED),
        "num_heads": ("n_head", REQUIRED),
        "ffn_dim": ("n_inner", None),
        "max_seq_len": ("n_positions", 1024),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tie_embeddings": ("tie_word_embeddings", True),
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    unused=("rope_theta", "rope_scaling", "qkv_bias"),
)

FAMILIES = {"llama": LLAMA, "gpt2": GPT2}
"""Module of `jaxpar.models`, which is also `model_type` in config.json -> what they call it."""

_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_len": "original_max_position_embeddings",
}


def find_family(name, found: str) -> Family:
    """The table of a family; ValueError lists the families there are."""
    if name not in FAMILIES:
        raise ValueError(f"{found} {name!r}; {nearest(name, FAMILIES)}")
    return FAMILIES[name]


def config_from_hugging_face(config: Mapping[str, Any]):
    """The config of `jaxpar.models` that a parsed config.json describes.

    Takes the rotary settings under their old names (rope_theta, rope_scaling) and their new one
    (rope_parameters). Dropout is a setting of training and is left at 0. Raises ValueError for a
    family, an activation or a rotary type that would give other numbers.

    >>> sizes = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    >>> config_from_hugging_face({"model_type": "gpt2", **sizes}).ffn_dim
    128
    """
    name = config.get("model_type")
    table = find_family(name, "config.json has model_type")
    for key, allowed in table.fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ValueError(
                f"config.json has {key}={config[key]!r}; jaxpar's {name} computes "
                f"{key}={allowed[0]!r} and nothing else"
            )
    values, missing = {}, []
    for ours, (theirs, default) in table.fields.items():
        found = config.get(theirs)
        values[ours] = default if found is None else found
        if values[ours] is REQUIRED:
            missing.append(theirs)
    if missing:
        raise ValueError(
            f"config.json of a {name} has no {', '.join(missing)}; give the whole "
            "file, not a part of it"
        )
    heads, embed = values["num_heads"], values["embed_dim"]
    values["num_kv_heads"] = values.get("num_kv_heads") or heads
    values["ffn_dim"] = values["ffn_dim"] or 4 * embed
    if not values.get("head_dim") and embed % heads:
        raise ValueError(
            f"{heads} heads do not divide the {embed} features of the embedding; "
            "config.json must say head_dim or sizes that divide"
        )
    values["head_dim"] = values.get("head_dim") or embed // heads
    rotary = {} if "rope_theta" in table.unused else _rotary(config)
    return importlib.import_module("jaxpar.models.config").DecoderConfig(**values, **rotary)


def _rotary(config: Mapping[str, Any]) -> dict:
    """`rope_theta` and `rope_scaling` from any of the three keys that config.json may have."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"config.json scales rotary embeddings with rope_type={kind!r}; jaxpar "
            "has default and llama3"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(
            f"config.json has partial_rotary_factor={partial}; jaxpar rotates whole "
            "heads, so it must be 1.0"
        )
    if kind == "default":
        return {"rope_theta": theta}
    missing = [key for key in _LLAMA3.values() if key not in rope]
    if missing:
        raise ValueError(
            f"config.json has rope_type='llama3' without {', '.join(missing)}; all of "
            f"{', '.join(_LLAMA3.values())} are needed"
        )
    scaling = RopeScaling(**{ours: rope[theirs] for ours, theirs in _LLAMA3.items()})
    return {"rope_theta": theta, "rope_scaling": scaling}


def config_to_hugging_face(config, family: str) -> dict[str, Any]:
    """The config.json of a config of ours, with the old rotary names, which all versions read.

    Dropout is not written. Raises ValueError for a field that the family has no place for.

    >>> from jaxpar.models import llama
    >>> config_to_hugging_face(llama.tiny(), "llama")["num_key_value_heads"]
    4
    """
    table = find_family(family, "there is no family")
    out = {"model_type": family, "architectures": [table.architecture], "dtype": "float32"}
    out |= {theirs: getattr(config, ours) for ours, (theirs, _) in table.fields.items()}
    out |= {key: allowed[0] for key, allowed in table.fixed.items() if allowed[0] is not None}
    if "rope_theta" not in table.unused:
        out["rope_theta"], scaling = config.rope_theta, config.rope_scaling
        out["rope_scaling"] = (
            None
            if scaling is None
            else {"rope_type": "llama3"}
            | {theirs: getattr(scaling, ours) for ours, theirs in _LLAMA3.items()}
        )
    back = config_from_hugging_face(out)
    for field in dataclasses.fields(config):
        had, kept = getattr(config, field.name), getattr(back, field.name)
        if had != kept and field.name not in (*table.unused, "dropout"):
            raise ValueError(
                f"{field.name}={had} has no place in the config of {family} in "
                f"transformers, where it would be {kept}; use {kept}"
            )
    return out
