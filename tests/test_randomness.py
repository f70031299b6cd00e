"""Masks and initial parameters are functions of the seed and the place, never of the layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.nn import ColumnLinear, dropout, local_sequence, param, stack
from layouts import MODELS, initial_state, ragged_batch, reference_loss, with_layers
from small import Tied, assert_close, place

ROWS, SEQ_LEN, WIDTH, NUM_LAYERS = 8, 16, 4, 4
VALUES = np.random.default_rng(0).normal(size=(NUM_LAYERS, ROWS, SEQ_LEN, WIDTH))
VALUES = VALUES.astype(np.float32)


class Shown(nnx.Module):
    def __init__(self):
        self.values = param(jnp.asarray(VALUES), ("layers", None, None, None))


class Masks(nnx.Module):
    """Each layer adds dropout(values[row, position]): its gradient is the mask it drew, times 2."""

    def __init__(self, key=None):
        self.start = param(jnp.zeros(WIDTH), ("embed",))
        self.layers = Shown()

    def embed(self, batch):
        return jnp.zeros((*local_sequence(batch["tokens"], batch).shape, WIDTH))

    def block(self, layer, x, batch):
        values = local_sequence(layer.values[...][batch["rows"]], batch)
        return x + dropout(values, 0.5, batch, site=1)


@functools.cache
def masks(seed=0, **settings):
    """bool [layer, row, position, width]: what was kept, as the backward pass saw it."""
    layout = jp.Layout(**settings, precision="fp32")
    plan = jp.make_plan(layout, Masks, devices=jax.devices()[: layout.num_devices])
    batch = ragged_batch(64, ROWS)
    function = jax.jit(plan.value_and_grad(lambda model, x, batch: (jnp.sum(x), None)))
    value, found = function(place(plan, Masks()), batch, jax.random.key(seed))
    found = jax.device_get(plan.canonical(found)).layers.values[...]
    assert set(np.unique(found)) == {0, 2}
    # the forward pass saw the same
    np.testing.assert_allclose(value, np.sum(found * VALUES), rtol=1e-4)
    return found > 0


LAYOUTS = [
    dict(data=8),
    dict(data=2, zero=3, microbatches=4),
    dict(data=2, tensor=2, remat="block"),
    dict(tensor=4, sequence_parallel=False),
    dict(pipe=2, data=2, tensor=2, microbatches=2),
    dict(pipe=2, schedule="interleaved", chunks=2, microbatches=4, remat="stage"),
]
MORE = [
    dict(pipe=4, microbatches=8, remat="block"),
    dict(pipe=4, schedule="gpipe", microbatches=2, remat="stage"),
    dict(data=2, tensor=2, remat="dots"),
    dict(replica=2, data=2, tensor=2, zero=2, microbatches=2),
]


# NVIDIA/Megatron-LM#1256, allenai/OLMo-core#828, jax-ml/jax#17982
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_masks_are_bit_equal_on_every_layout_and_when_computed_again(settings):
    np.testing.assert_array_equal(masks(**settings), masks())


@pytest.mark.full
@pytest.mark.parametrize("settings", MORE, ids=str)
def test_masks_are_bit_equal_on_every_layout_and_when_computed_again_full(settings):
    np.testing.assert_array_equal(masks(**settings), masks())


def test_masks_are_those_of_the_layer_on_one_device():
    batch = dict(dropout_key=jax.random.key(0))
    for i in range(NUM_LAYERS):
        want = dropout(jnp.ones((ROWS, SEQ_LEN, WIDTH)), 0.5, {**batch, "layer": i}, site=1)
        np.testing.assert_array_equal(masks()[i], want > 0)


# tenstorrent/tt-metal#55947, young-geng/scalax#6: shards and microbatches shared a mask
def test_no_two_layers_rows_or_positions_share_a_mask():
    found = masks()
    assert abs(found.mean() - 0.5) < 0.05
    whole_rows = found.reshape(NUM_LAYERS * ROWS, -1)
    assert len(np.unique(whole_rows, axis=0)) == NUM_LAYERS * ROWS
    by_position = np.moveaxis(found, 2, 0).reshape(SEQ_LEN, -1)
    assert len(np.unique(by_position, axis=0)) == SEQ_LEN


def test_steps_with_other_keys_draw_other_masks():
    assert 0.4 < (masks() != masks(seed=1)).mean() < 0.6


def test_sites_of_one_layer_draw_other_masks():
    batch = dict(dropout_key=jax.random.key(0), layer=0)
    x = jnp.ones((ROWS, SEQ_LEN, WIDTH))
    drawn = [dropout(x, 0.5, batch, site=site) > 0 for site in range(3)]
    assert len(np.unique(np.reshape(drawn, (3, -1)), axis=0)) == 3


def test_without_a_key_nothing_is_dropped():
    x = jnp.ones((2, 4, WIDTH))
    np.testing.assert_array_equal(dropout(x, 0.5, {}, site=0), x)


@pytest.mark.parametrize(
    "settings",
    [
        dict(data=2, tensor=2, zero=3, microbatches=2),
        pytest.param(dict(pipe=2, data=2, tensor=2, remat="block"), marks=pytest.mark.full),
        pytest.param(dict(pipe=2, data=4, zero=2, remat="stage"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_language_model_with_dropout_has_the_gradients_of_one_device(settings):
    name = with_layers("llama", 2)
    module, config = MODELS[name]
    config = dataclasses.replace(config, dropout=0.1)
    layout, key = jp.Layout(**settings, precision="fp32"), jax.random.key(3)
    plan = jp.make_plan(layout, lambda key: module.Model(config, rngs=nnx.Rngs(key)),
                        devices=jax.devices()[: layout.num_devices])  # fmt: skip
    leaves = jax.tree.leaves(initial_state(name)[0])
    model, batch = jax.tree.structure(plan.state).unflatten(leaves), ragged_batch(64, 8)
    value, found = jax.jit(plan.value_and_grad(module.loss))(place(plan, model), batch, key)
    want_value, want = jax.jit(jax.value_and_grad(reference_loss))(model, batch, key)
    without = jax.jit(reference_loss)(model, batch)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert abs(want_value - without) > 1e-4
    assert_close(jax.device_get(plan.canonical(found)), jax.device_get(want))


# ---- initial parameters


VIRTUAL = dict(pipe=2, schedule="interleaved", chunks=2)


# jax-ml/jax#40232, jax-ml/jax#21232
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_initial_parameters_are_equal_on_every_layout(impl):
    def init(key):
        return Tied(key, vocab_size=496, layers=4)

    key = jax.random.key(5, impl=impl)
    want = jax.device_get(jax.jit(init)(key))
    for settings in (dict(data=4, zero=3), dict(tensor=8), dict(pipe=2, data=2, tensor=2), VIRTUAL):
        layout = jp.Layout(**settings)
        plan = jp.make_plan(layout, init, devices=jax.devices()[: layout.num_devices])
        found = jax.device_get(plan.canonical(plan.init(key)))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_the_width_of_initial_numbers_is_that_of_one_layer_not_of_the_stack():
    std = 256**-0.5
    layers = stack(lambda key: ColumnLinear(256, (256,), ("ffn",), key=key, std=std), 8,
                   jax.random.key(0))  # fmt: skip
    found = np.std(layers.weight[...], axis=(1, 2))
    np.testing.assert_allclose(found, 0.0625, rtol=0.02)
    first, second = layers.weight[0], layers.weight[1]
    assert np.abs(first - second).max() > std
