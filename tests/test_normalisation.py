"""Loss and gradients are divided once, by the number of counted tokens of the global batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from compiled import compiled
from jaxpar import loss as losses
from jaxpar.nn import Settings
from layouts import initial_state, ragged_batch, reference_loss, with_layers
from small import (
    LAYOUTS,
    ONE,
    assert_close,
    gradients,
    layout,
    numbered_batch,
    place,
    row_loss,
    squares,
    train,
)

MEAN = 210 / 52
"""Row i counts [16, 1, 5, 0, 16, 3, 9, 2][i] tokens of loss i + 1. The mean over microbatches of
two rows would be 4.099634, and over rows NaN."""


def one_activation(layers=8):
    """x = 1 from `start`; every layer adds 0 and has a gradient nonetheless."""
    return squares(layers, start=ONE)


def check_rows(name, microbatches):
    value, found = gradients(
        one_activation(), row_loss, layout(name, microbatches=microbatches), numbered_batch()
    )
    np.testing.assert_allclose(value, 4.038462, rtol=1e-6)
    np.testing.assert_allclose(found.start[...], MEAN * ONE, rtol=1e-6)


CASES = [
    (name, m)
    for name, settings in LAYOUTS.items()
    for m in (1, 2, 4, 8)
    if 8 % (m * settings.get("data", 1) * settings.get("replica", 1)) == 0
]
DEFAULT = [
    ("one", 8), ("data8", 1), ("tensor4", 4), ("pipe4", 4), ("pipe2_data2_tensor2", 4),
    ("pipe2_interleaved", 8), ("data4_zero2", 2), ("pipe2_data4_zero3", 2),
]  # fmt: skip


# pytorch/torchtitan#2972, huggingface/transformers#24725, NVIDIA-NeMo/Automodel#3796
@pytest.mark.parametrize("name, microbatches", DEFAULT)
def test_rows_weigh_as_many_tokens_as_they_count(name, microbatches):
    check_rows(name, microbatches)


@pytest.mark.full
@pytest.mark.parametrize("name, microbatches", [c for c in CASES if c not in DEFAULT])
def test_rows_weigh_as_many_tokens_as_they_count_full(name, microbatches):
    check_rows(name, microbatches)


# huggingface/transformers#24725: the mean of the two rows' means would be 1.5
@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_token_of_gradient_2_and_three_of_gradient_1_step_by_1_25(microbatches):
    batch = numbered_batch(2, valid=[3, 1], seq_len=4)  # rows of target 1 and 2
    start = np.float32([1, 0, 0, 0])
    split = layout("one", microbatches=microbatches)
    (model, _), _ = train(squares(1, start=start), row_loss, split, optax.sgd(1.0), [batch])
    np.testing.assert_allclose(model.start[...], [1 - 1.25, 0, 0, 0], rtol=1e-6)


def plain_sum(model, x, batch):
    return row_loss(model, x, batch)[0], None


# NVIDIA/Megatron-LM#906: gradients were off by the size of an axis
@pytest.mark.parametrize("name", ["one", "data8", "pipe2_data2_tensor2"])
def test_a_plain_sum_is_the_sum_on_every_layout(name):
    value, found = gradients(one_activation(4), plain_sum, layout(name), numbered_batch())
    np.testing.assert_allclose(value, 210, rtol=1e-6)
    np.testing.assert_allclose(found.start[...], 210 * ONE, rtol=1e-6)


# allenai/open-instruct#1498: only the last microbatch's gradient survived
@pytest.mark.parametrize("name", ["data4_zero2", "pipe2_data4_zero3"])
def test_a_last_microbatch_without_tokens_does_not_erase_the_others(name):
    batch = numbered_batch(16, valid=[16, 5, 3, 0])
    _, found = gradients(one_activation(4), row_loss, layout(name, microbatches=4), batch)
    mean = np.sum(batch["weights"] * batch["targets"]) / batch["weights"].sum()
    np.testing.assert_allclose(found.start[...], mean * ONE, rtol=1e-6)


def test_a_count_that_depends_on_the_model_is_refused():
    def loss(model, x, batch):
        return jnp.sum(x), jnp.sum(x)

    with pytest.raises(ValueError, match="must depend on the batch alone"):
        gradients(squares(), loss, layout("data8"), numbered_batch())


# ---- a language model: one program for several batches

LAYOUT = jp.Layout(pipe=2, data=2, tensor=2, zero=2, microbatches=2, precision="fp32")
NAME = with_layers("llama_tied", 2)


def language_model(batch):
    run = compiled("llama_tied", LAYOUT, rows=8, num_layers=2)
    model = place(run.plan, initial_state(NAME)[0])
    return jax.device_get(run.program(model, jax.device_put(batch, run.plan.batch_sharding)))


@functools.cache
def reference_gradients():
    function = jax.jit(jax.value_and_grad(reference_loss))
    return jax.device_get(function(initial_state(NAME)[0], ragged_batch(64, 8)))


# pytorch/torchtitan#2972: right loss, gradients 52 times too big
def test_gradients_of_unequal_rows_equal_one_device_where_loss_and_backward_are_on_stages():
    value, found = language_model(ragged_batch(64, 8))
    want_value, want = reference_gradients()
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_close(found, want)


# NVIDIA-NeMo/Automodel#3796: 0 / 0
def test_a_batch_without_counted_tokens_has_loss_0_and_gradients_0():
    batch = ragged_batch(64, 8)
    value, found = language_model({**batch, "weights": 0 * batch["weights"]})
    assert value == 0
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, 0)


def test_a_batch_without_counted_tokens_is_seen_in_the_metrics():
    batch = numbered_batch(8, valid=[0])
    (model, _), (metrics,) = train(one_activation(4), row_loss, layout("data8"), optax.sgd(1.0),
                                   [batch])  # fmt: skip
    assert metrics["tokens"] == metrics["loss"] == metrics["grad_norm"] == 0
    assert not metrics["nonfinite"]
    np.testing.assert_array_equal(model.start[...], ONE)


MESH = jp.make_mesh(jp.Layout(tensor=4), jax.devices()[:4])


def entropy(x, table, batch):
    return losses.cross_entropy(x, table, batch, 11)


def entropy_split_over_tensor(x, table, batch):
    batch = {**batch, "settings": Settings(vocab_axes=("tensor",))}
    return jax.shard_map(
        lambda x, table: losses.cross_entropy(x, table, batch, 11),
        mesh=MESH, in_specs=(P(), P("tensor")), out_specs=P(),
    )(x, table)  # fmt: skip


# NVIDIA-NeMo/Megatron-Bridge#3117: NaN times a mask of 0 stays NaN
@pytest.mark.parametrize("cross_entropy", [entropy, entropy_split_over_tensor])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinite_numbers_at_tokens_that_do_not_count_reach_neither_loss_nor_gradient(
    bad, cross_entropy
):
    rng = np.random.default_rng(0)
    x, table = (rng.normal(size=s).astype(np.float32) for s in ((2, 16, 8), (12, 8)))
    batch = numbered_batch(2, valid=[13, 5])

    def loss(x, table):
        loss_sum, count = cross_entropy(x, table, batch)
        return loss_sum / count

    counted = batch["weights"][..., None] > 0
    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, found = function(np.where(counted, x, bad), table)
    want_value, want = function(np.where(counted, x, 0), table)
    assert value == want_value and np.isfinite(value)
    assert_close(found, want, tolerance=0)
    np.testing.assert_array_equal(np.where(counted, 0, found[0]), 0)
