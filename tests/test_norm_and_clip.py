"""The gradient norm counts each number once, and what depends on it is decided once, globally."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from layouts import model_init, with_layers
from small import (
    LAYOUTS,
    Squares,
    layout,
    mean_loss,
    numbered_batch,
    place,
    random_squares,
    row_loss,
    squares,
    train,
    trainer,
)

START = np.float32([3, 0, 0, 4])
CLIPPED = np.float32([0.6, 0, 0, 0.8])
CLIP = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))

FULL = numbered_batch(valid=[16])
"""128 tokens: dividing by a power of two rounds nothing."""

DEFAULT = ["data4_zero0", "data4_zero2", "data4_zero3", "tensor4", "pipe2_data2_tensor2"]


def check_clip(name):
    # the gradient is the parameter, of norm 5; clipped shard by shard it would be [1, 0, 0, 1]
    (model, _), (metrics,) = train(squares(8, start=START), mean_loss, layout(name), CLIP,
                                   [FULL])  # fmt: skip
    assert metrics["grad_norm"] == 5
    np.testing.assert_allclose(START - model.start[...], CLIPPED, rtol=1e-6)


# meta-pytorch/torchtune#2420: a local norm on shards
@pytest.mark.parametrize("name", DEFAULT)
def test_optax_clips_by_the_norm_of_the_whole_gradient(name):
    check_clip(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in DEFAULT])
def test_optax_clips_by_the_norm_of_the_whole_gradient_full(name):
    check_clip(name)


# ROCm/TransformerEngine#715: parameters that every tensor device holds were counted twice, 13.3417
@pytest.mark.parametrize("sizes", [{}, dict(tensor=2), dict(tensor=2, pipe=2)], ids=str)
def test_a_whole_gradient_of_3_and_a_split_one_of_4_and_12_have_norm_13(sizes):
    init = squares(1, scale=(0, 0, 0, 3), up=(4, 12))
    if "pipe" in sizes:
        init = squares(2, scale=[[0, 0, 0, 3], [0] * 4], up=[[0, 12], [4, 0]])
    settings = jp.Layout(**sizes, precision="fp32")
    _, (metrics,) = train(init, mean_loss, settings, optax.sgd(1.0), [FULL])
    assert metrics["grad_norm"] == 13


# deepspeedai/DeepSpeed#8475: the mean of the devices' norms would be 7.236068
@pytest.mark.parametrize("start", [(2, 4, 6, 8), (2, 6, 4, 8), (8, 2, 6, 4)])
def test_the_norm_does_not_depend_on_which_device_holds_which_gradient(start):
    settings = jp.Layout(data=2, zero=3, precision="fp32")
    _, (metrics,) = train(squares(1, start=start), mean_loss, settings, optax.sgd(1.0),
                          [FULL])  # fmt: skip
    np.testing.assert_allclose(metrics["grad_norm"], 10.954451, rtol=1e-7)


# deepspeedai/DeepSpeed#7837: the norm jumped when only the ZeRO stage changed
def test_five_norms_are_the_same_whatever_the_zero_stage():
    batches = [numbered_batch(8, valid=[16, 1, 5, 0, 16, 3, 9, 2 + i]) for i in range(5)]
    norms = []
    for zero in range(4):
        settings = layout("data4_zero0", zero=zero, microbatches=2)
        _, metrics = train(random_squares(), row_loss, settings, optax.adam(0.1), batches)
        norms.append([m["grad_norm"] for m in metrics])
    assert len(set(norms[0])) == 5
    for other in norms[1:]:
        np.testing.assert_allclose(other, norms[0], rtol=1e-6)


# deepspeedai/DeepSpeed#7220: the norm in the log was above the clip, since it was the one before
def test_the_norms_before_and_after_clipping_are_two_metrics():
    settings = layout("pipe2_data2_tensor2")
    _, (metrics,) = train(squares(4, start=START), mean_loss, settings, optax.sgd(1.0),
                          [FULL], clip_norm=0.01)  # fmt: skip
    assert metrics["grad_norm"] == 5
    assert 0.01 * (1 - 1e-6) <= metrics["grad_norm_clipped"] <= 0.01 * (1 + 1e-6)


# ---- weight decay

DECAYED = {"weight", "table", "positions"}


# salesforce/jaxformer#28, google-deepmind/optax#25: stacked norms and biases were decayed
@pytest.mark.parametrize(
    "sizes",
    [dict(), dict(data=8), dict(pipe=2, data=2, schedule="interleaved", chunks=2)],
    ids=["one", "data8", "on stages"],
)
def test_decay_takes_matrices_and_leaves_norms_and_biases_however_layers_are_stacked(sizes):
    tx = optax.adamw(0.1, weight_decay=0.1, mask=jp.decay_mask)
    shapes = jax.eval_shape(model_init(with_layers("gpt2", 5)), jax.random.key(0))

    def init(key=None):
        model = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), shapes)
        return model, tx.init(model)

    settings = jp.Layout(**sizes)
    plan = jp.make_plan(settings, init, devices=jax.devices()[: settings.num_devices])

    @jax.jit
    def without_gradient(model, opt_state):
        updates, opt_state = tx.update(jax.tree.map(jnp.zeros_like, model), opt_state, model)
        return optax.apply_updates(model, updates), opt_state

    state = without_gradient(*place(plan, jax.jit(init)()))
    model, _ = jax.device_get(plan.canonical(state))
    names = set()
    for keys, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        name = jax.tree_util.keystr(keys, simple=True, separator=".").split(".")[-2]
        np.testing.assert_allclose(leaf, 0.99 if name in DECAYED else 1, rtol=1e-6)
        names.add(name)
    assert names == DECAYED | {"bias", "scale"}


# ---- steps that are skipped

SPOILED = 7
"""The token that makes layer 1 return NaN."""


class Spoiling(Squares):
    def block(self, layer, x, batch):
        x = super().block(layer, x, batch)
        tokens = jp.nn.local_sequence(batch["tokens"], batch)[..., None]
        return jnp.where((tokens == SPOILED) & (batch["layer"] == 1), jnp.nan, x)


def spoiling(key=None):
    return Spoiling(*[leaf[...] for leaf in parts_of(random_squares(2)())])


def parts_of(model):
    return model.start, model.layers.scale, model.layers.up, model.one, model.pair


# ecmwf/WeatherGenerator#2724: rank 0 decided alone
@pytest.mark.parametrize(
    "sizes", [dict(data=4), dict(pipe=2, data=4), dict(data=2, tensor=2, zero=2)], ids=str
)
def test_a_nan_in_one_rows_layer_changes_nothing_anywhere_and_the_next_step_is_clean(sizes):
    settings = jp.Layout(**sizes, precision="fp32")
    tx = optax.adamw(1e-2)
    clean = numbered_batch(4)
    spoiled = {**clean, "tokens": clean["tokens"].copy()}
    spoiled["tokens"][3, 0] = SPOILED  # in the rows of the last shard of data alone

    run = trainer(spoiling, row_loss, settings, tx, skip_nonfinite=True)
    start, _ = run([])
    untouched, (metrics,) = run([spoiled])
    assert metrics["skipped"] == metrics["nonfinite"] == 1
    jax.tree.map(np.testing.assert_array_equal, untouched, start)
    after, (_, metrics) = run([spoiled, clean])
    want, (want_metrics,) = run([clean])
    assert not metrics["skipped"] and metrics == want_metrics
    jax.tree.map(np.testing.assert_array_equal, after, want)
    reference, _ = train(spoiling, row_loss, layout("one"), tx, [clean], skip_nonfinite=True)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_without_skip_nonfinite_the_metrics_say_so():
    batch = numbered_batch(4)
    batch["tokens"][3, 0] = SPOILED
    _, (metrics,) = train(spoiling, row_loss, layout("data4_zero1"), optax.sgd(1.0), [batch])
    assert metrics["nonfinite"] and not metrics["skipped"]
