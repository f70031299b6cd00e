"""The tables every parity test uses: models, layouts, a batch with unequal rows, and the
one-device run that everything must equal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar as jp
from jaxpar.models import gpt2, llama

VALID = [16, 1, 5, 0, 16, 3, 9, 2]
"""Counted tokens of eight rows: unequal, one row empty, 52 in all."""

SEQ_LEN = 16

_LLAMA = llama.preset("tiny", embed_dim=32, ffn_dim=64, head_dim=4, vocab_size=64)
MODELS = {
    "llama": (llama, _LLAMA),
    "llama_kv2": (llama, dataclasses.replace(_LLAMA, num_kv_heads=2)),
    "llama_tied": (
        llama,
        dataclasses.replace(_LLAMA, tie_embeddings=True, qk_norm=True, qkv_bias=True),
    ),
    "gpt2": (gpt2, gpt2.preset("tiny", embed_dim=32, ffn_dim=64, head_dim=4, vocab_size=61)),
}
"""Name -> (module, config). The vocabulary of gpt2 divides by nothing."""


def with_layers(name: str, num_layers: int) -> str:
    """Adds a model with another number of layers to the table; returns its name."""
    module, config = MODELS[name]
    new = f"{name}_{num_layers}_layers"
    MODELS.setdefault(new, (module, dataclasses.replace(config, num_layers=num_layers)))
    return new


ZERO_BY_THEORY = {"gpt2": {"layers.attention.key.bias"}}
"""Without rotary or qk-norm a key bias moves all of a query's scores alike: no gradient."""

LAYOUTS = {
    "data8": dict(data=8),
    "tensor4": dict(tensor=4),
    "tensor8": dict(tensor=8),
    "data2_tensor4": dict(data=2, tensor=4),
    "replica2_data2_tensor2": dict(replica=2, data=2, tensor=2),
}

# Of the optimizer: eps bounds how much rounding in a tiny gradient can move a parameter.
LEARNING_RATE, EPS, CLIP = 3e-4, 1e-5, 1.0


def optimizer() -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(LEARNING_RATE, eps=EPS, weight_decay=0.1, mask=jp.decay_mask),
    )


def ragged_batch(vocab_size: int, rows: int = 32, seed: int = 0, packed: bool = False) -> dict:
    """Random tokens [rows, 16]; row i counts VALID[i % 8] tokens. `packed`: several documents."""
    rng = np.random.default_rng(seed)
    shape = (rows, SEQ_LEN)
    valid = np.resize(VALID, rows)
    batch = dict(
        tokens=rng.integers(0, vocab_size, shape).astype(np.int32),
        targets=rng.integers(0, vocab_size, shape).astype(np.int32),
        weights=(np.arange(SEQ_LEN) < valid[:, None]).astype(np.float32),
    )
    if packed:
        starts = rng.random(shape) < 0.25
        segments = np.cumsum(starts, axis=1).astype(np.int32)
        first = np.maximum.accumulate(np.where(starts, np.arange(SEQ_LEN), 0), axis=1)
        batch |= dict(segment_ids=segments, positions=(np.arange(SEQ_LEN) - first).astype(np.int32))
    return batch


def reference_loss(model, batch, key=None, module_loss=None):
    """The loss of a model on one device, by plain calls: no mesh, no schedule, no ZeRO."""
    length = batch["tokens"].shape[1]
    batch = {"positions": jnp.broadcast_to(jnp.arange(length), batch["tokens"].shape)} | dict(batch)
    if key is not None:
        batch["dropout_key"] = key
    batch = model.prepare(batch)
    x = model.embed(batch)
    for i in range(jax.tree.leaves(model.layers)[0].shape[0]):
        layer = jax.tree.map(lambda a, i=i: a[i], model.layers)
        x = model.block(layer, x, {**batch, "layer": i})
    loss_sum, count = (module_loss or type(model).loss)(model, x, batch)
    return loss_sum / jnp.maximum(count, 1)


def model_init(name: str):
    module, config = MODELS[name]
    return lambda key: module.Model(config, rngs=nnx.Rngs(key))


def state_init(name: str):
    def init(key):
        model = model_init(name)(key)
        return model, optimizer().init(model)

    return init


@functools.cache
def initial_state(name: str):
    """A state with random numbers in every parameter: biases of 0 and scales of 1 hide mistakes."""
    rng = np.random.default_rng(1)

    def draw(keys, leaf):
        centre = 1.0 if "scale" in jax.tree_util.keystr(keys) else 0.0
        return np.float32(centre + 0.05 * rng.standard_normal(leaf.shape))

    shapes = jax.eval_shape(model_init(name), jax.random.key(0))
    model = jax.tree_util.tree_map_with_path(draw, shapes)
    return model, jax.device_get(optimizer().init(model))


def leaf_names(tree) -> list[str]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        jax.tree_util.keystr(p, simple=True, separator=".").removesuffix(".value") for p, _ in flat
    ]


def three_steps(step, state, batches) -> dict:
    """Losses and norms of three steps, the first step's gradients, the state at the end."""
    losses, norms, first = [], [], None
    for batch in batches:
        state, loss, norm, gradients = step(state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
        first = gradients if first is None else first
    return dict(loss=losses, norm=norms, gradients=first, state=state)


def make_step(value_and_grad, shardings=None):
    def step(state, batch):
        model, opt_state = state
        loss, gradients = value_and_grad(model, batch)
        updates, opt_state = optimizer().update(gradients, opt_state, model)
        norm = optax.tree.norm(gradients)
        return (optax.apply_updates(model, updates), opt_state), loss, norm, gradients

    return jax.jit(step, out_shardings=None if shardings is None else (shardings, None, None, None))


def step_batches(name: str, rows: int = 32, packed: bool = False) -> list[dict]:
    vocab = MODELS[name][1].vocab_size
    return [ragged_batch(vocab, rows, seed, packed) for seed in range(3)]


@functools.cache
def reference(name: str, rows: int = 32, packed: bool = False) -> dict:
    """Three steps on one device."""
    state = initial_state(name)
    step = make_step(jax.value_and_grad(reference_loss))
    result = three_steps(step, state, step_batches(name, rows, packed))
    return result | {"model": result["state"][0]}


def run_layout(name: str, layout: jp.Layout, rows: int = 32, packed: bool = False) -> dict:
    """Three steps under a layout."""
    plan = jp.make_plan(layout, state_init(name), devices=jax.devices()[: layout.num_devices])
    state = jax.device_put(plan.stored(initial_state(name)), plan.shardings)
    step = make_step(plan.value_and_grad(MODELS[name][0].loss), plan.shardings)
    result = three_steps(step, state, step_batches(name, rows, packed))
    model, opt_state = result["state"]
    gradients, _ = plan.canonical((result["gradients"], opt_state))
    model, _ = plan.canonical((model, opt_state))
    return result | {"model": jax.device_get(model), "gradients": jax.device_get(gradients)}


def assert_equal_runs(name: str, got: dict, want: dict, tolerance: float = 1e-5):
    """Loss, norm, every gradient leaf and every parameter: max|a-b| <= tolerance * max|want|."""
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=tolerance)
    np.testing.assert_allclose(got["norm"], want["norm"], rtol=tolerance)
    for kind in ("gradients", "model"):
        for leaf, a, b in zip(
            leaf_names(want[kind]),
            jax.tree.leaves(got[kind]),
            jax.tree.leaves(want[kind]),
            strict=True,
        ):
            assert a.shape == b.shape, f"{kind} {leaf}"
            scale = np.abs(b).max()
            if leaf in ZERO_BY_THEORY.get(name, ()):
                # the gradient is rounding noise; a step of Adam on it is at most the rate
                scale = 1e5 * 3 * LEARNING_RATE if kind == "model" else np.float32(want["norm"][0])
            error = np.abs(a - b).max()
            assert error <= tolerance * scale, f"{kind} {leaf}: {error:.2e} of {scale:.2e}"
