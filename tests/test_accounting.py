"""One compilation, no traffic that nobody asked for, precision kept, programs that do not grow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from compiled import compiled
from jaxpar.cluster import hlo
from small import (
    Squares,
    layout,
    mean_loss,
    numbered_batch,
    place,
    random_squares,
    row_loss,
    squares,
    train,
)

TX = optax.adamw(1e-2)


# marin-community/marin#8911, AI-Hypercomputer/maxtext#4174: the second step compiled again
@pytest.mark.parametrize("name", ["data4_zero1", "pipe2_data2_tensor2"])
def test_a_step_compiles_once_fresh_after_an_evaluation_and_resumed(name):
    init, batch, split = random_squares(), numbered_batch(), layout(name, microbatches=2)
    plan = jp.make_plan(
        split, lambda key: (init(), TX.init(init())), devices=jax.devices()[: split.num_devices]
    )
    step, evaluate = plan.train_step(TX, row_loss), jax.jit(plan.loss(row_loss))
    state = plan.init(jax.random.key(0))
    for resume in (False, True):
        if resume:  # numpy arrays, as they lie on disk
            state = place(plan, jax.device_get(plan.canonical(state)))
        for _ in range(5):
            state, _ = step(state, batch)
        evaluate(state[0], batch)
        state, _ = step(state, batch)
    assert step._cache_size() == evaluate._cache_size() == 1


def test_a_loop_of_ones_own_compiles_once():
    init, batch = random_squares(), numbered_batch()
    plan = jp.make_plan(layout("data8"), lambda key: (init(), TX.init(init())))
    value_and_grad = plan.value_and_grad(row_loss)

    @partial(jax.jit, donate_argnums=0, out_shardings=plan.shardings)
    def step(state, batch):
        model, opt_state = state
        _, found = value_and_grad(model, batch)
        updates, opt_state = TX.update(found, opt_state, model)
        return optax.apply_updates(model, updates), opt_state

    state = plan.init(jax.random.key(0))
    for _ in range(5):
        state = step(state, batch)
    assert step._cache_size() == 1


# ---- traffic and memory


def lowered(split, layers=4, rows=8):
    """The gradient function before XLA."""
    init = squares(layers)
    plan = jp.make_plan(split, init, devices=jax.devices()[: split.num_devices])
    function = jax.jit(plan.value_and_grad(mean_loss), out_shardings=(None, plan.shardings))
    return function.lower(place(plan, init()), numbered_batch(rows))


# openxla/xla#13306: cutting the batch into microbatches moved rows between devices
@pytest.mark.parametrize("name", ["data8", "pipe2_data4_zero3"])
def test_cutting_the_batch_into_microbatches_moves_no_row(name):
    split = layout(name, microbatches=4)
    text = lowered(split, rows=32).compile().as_text()
    ops = {(c.op, c.axes) for c in hlo.collectives(text, split.axis_sizes)}
    exchanged = [op for op, _ in ops if op in ("all-to-all", "ragged-all-to-all")]
    assert not exchanged
    assert "s32[32,16]" not in text  # the whole batch is on no device
    sent = {axes for op, axes in ops if op == "collective-permute"}
    assert sent == ({("pipe",)} if split.pipe > 1 else set())  # activations from stage to stage


# AI-Hypercomputer/torchprime#160: stacked gradients were split over one axis alone
def test_stacked_weights_and_gradients_are_split_over_data_and_tensor_and_never_gathered_whole():
    split = jp.Layout(data=4, tensor=2, zero=3, precision="fp32", remat="block")
    text = compiled("wide", split, rows=8, seq_len=8, num_layers=16).text
    assert "f32[16,16,128]" in text  # layers, embed / data, ffn / tensor
    for whole in ("f32[16,64,256]", "f32[16,64,128]", "f32[16,16,256]"):
        assert whole not in text


# jax-ml/jax#2777, Olmax#26: programs that grew with layers or microbatches
@pytest.mark.parametrize(
    "settings",
    [dict(data=2, zero=3), dict(pipe=2),
     pytest.param(dict(pipe=4, schedule="gpipe"), marks=pytest.mark.full),
     dict(pipe=2, schedule="interleaved", chunks=2, remat="block")],
    ids=str,
)  # fmt: skip
def test_programs_are_as_long_for_64_layers_and_64_microbatches_as_for_4(settings):
    def lines(layers, microbatches):
        split = jp.Layout(**settings, precision="fp32", microbatches=microbatches)
        return len(lowered(split, layers, rows=128).as_text().splitlines())

    few = lines(4, 4)
    assert few > 100
    for layers, microbatches in ((64, 4), (4, 16), (4, 64)):
        assert lines(layers, microbatches) < 1.2 * few, (layers, microbatches)


# ---- precision


class Linear(Squares):
    """x is the sum of `start`: a gradient of 1, always."""

    def embed(self, batch):
        return jnp.zeros((*batch["tokens"].shape, 1)) + jnp.sum(self.start[...])


def linear(dtype):
    def init(key=None):
        shapes = ((4,), (2, 4), (2, 4), (1,), (2, 1))
        return jax.tree.map(lambda a: a.astype(dtype), Linear(*map(np.ones, shapes)))

    return init


# workofart/ml-by-hand#85: 100 steps of 0.0006 from 1, each rounded away
def test_small_steps_add_up_in_fp32_master_weights_though_products_are_bf16():
    split = jp.Layout(data=2, precision="bf16")
    batches = [numbered_batch(8, valid=[16])] * 100
    (model, _), _ = train(linear(np.float32), mean_loss, split, optax.adam(6e-4), batches)
    assert model.start.dtype == np.float32
    np.testing.assert_allclose(model.start[...], 0.94, rtol=0, atol=1e-3)


def test_parameters_stored_as_bf16_are_warned_of_since_small_steps_are_lost():
    batches = [numbered_batch(8, valid=[16])] * 100
    with pytest.warns(UserWarning, match="stored as bfloat16, without a float32 master copy"):
        (model, _), _ = train(linear(jnp.bfloat16), mean_loss, jp.Layout(data=2),
                              optax.adam(6e-4), batches)  # fmt: skip
    np.testing.assert_array_equal(model.start[...], 1)
