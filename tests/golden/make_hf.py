"""Makes tests/golden/hf/*.npz: random models of `transformers`, and what they compute on a CPU.

    pip install -e '.[parity]' && python tests/golden/make_hf.py

Each file holds the weights under their own names (`weights/...`), `config` (JSON), `tokens` and
`labels` [B, T], the `logits` [B, T, V] and the `loss`. Label -100 is not counted.
"""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "hf"
ROWS, LENGTH, VOCAB = 2, 32, 64
COUNTED = (32, 19)
"""Labels that count, in each row."""

LLAMA = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             bos_token_id=None, eos_token_id=None)  # fmt: skip
# Of the 8 frequencies of a head, position 64 is 10 turns of the first (kept), 3.2 and 1.02 of the
# next two (blended), and less than one of the others (stretched by 8).
SCALED = dict(
    rope_theta=10_000.0,
    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=64),
)  # fmt: skip

CASES = {
    "llama": ("llama", LLAMA | dict(tie_word_embeddings=False)),
    "llama_tied_scaled": ("llama", LLAMA | SCALED | dict(tie_word_embeddings=True, head_dim=16)),
    "llama_bias": ("llama", LLAMA | dict(attention_bias=True, rms_norm_eps=1e-5)),
    "gpt2": (
        "gpt2",
        dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=LENGTH,
             bos_token_id=None, eos_token_id=None),
    ),
}  # fmt: skip
"""Name -> (model_type, config). jaxpar's Llama adds no bias after attention, so `o_proj.bias` of
these models is 0; those of query, key and value are random."""


def make_model(family: str, config: dict, seed: int = 0):
    """A random model, large enough numbers everywhere that no mistake hides behind small ones."""
    import torch
    import transformers

    kinds = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
             "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel)}  # fmt: skip
    make_config, make = kinds[family]
    model = make(make_config(**config)).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            numbers = 0.25 * rng.standard_normal(param.shape)
            is_scale = name.endswith("weight") and ("norm" in name or "ln_" in name)
            param.copy_(torch.from_numpy(np.float32(numbers + is_scale)))
            if name.endswith("o_proj.bias"):
                param.zero_()
    return model


def make_batch(vocab: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """tokens and labels [B, T], the labels of `transformers`: those of the tokens themselves."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (ROWS, LENGTH)).astype(np.int32)
    return tokens, np.where(np.arange(LENGTH) < np.array(COUNTED)[:, None], tokens, -100)


def run_model(model, tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """(logits [B, T, V], loss): the mean over counted labels, each predicted from its left."""
    import torch

    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(tokens).long(),
                    labels=torch.from_numpy(labels).long())  # fmt: skip
    return out.logits.numpy(), out.loss.numpy()


def weights_of(model) -> dict[str, np.ndarray]:
    """Name -> numbers; a tied head is left out, as in the files that transformers writes."""
    return {name: param.detach().numpy() for name, param in model.named_parameters()}


def make_case(name: str) -> dict[str, np.ndarray]:
    """The arrays of one golden file."""
    family, config = CASES[name]
    model = make_model(family, config)
    tokens, labels = make_batch(VOCAB)
    logits, loss = run_model(model, tokens, labels)
    weights = {f"weights/{key}": value for key, value in weights_of(model).items()}
    text = json.dumps(model.config.to_dict(), sort_keys=True)
    return (
        dict(config=np.array(text), tokens=tokens, labels=labels, logits=logits, loss=loss)
        | weights
    )


def main() -> None:
    for name in CASES:
        file = FOLDER / f"{name}.npz"
        np.savez_compressed(file, **make_case(name))
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
