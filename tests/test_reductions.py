"""Gradients are summed once over every axis, and all copies of a parameter stay bit-equal."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.nn import RowLinear, Settings, param
from layouts import MODELS, initial_state, optimizer, ragged_batch, state_init, with_layers
from small import (
    LAYOUTS,
    assert_close,
    gradients,
    layout,
    mean_loss,
    numbered_batch,
    place,
    random_squares,
)

DEFAULT = ["data8", "tensor4", "tensor4_whole", "pipe2_data2_tensor2", "replica2_data2_tensor2",
           "data4_zero0", "data4_zero3", "pipe2_data4_zero3"]  # fmt: skip


def check_gradients(name, **more):
    init = random_squares(8)
    value, found = gradients(init, mean_loss, layout(name, **more), numbered_batch())
    assert_close(found, init(), tolerance=2e-6)
    square = sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(init()))
    np.testing.assert_allclose(value, square / 2, rtol=1e-5)


# jax-ml/jax#36886, NVIDIA/Megatron-LM#1446: factors of the size of an axis
@pytest.mark.parametrize("name", DEFAULT)
def test_no_gradient_has_a_factor_of_any_axis(name):
    check_gradients(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in DEFAULT])
def test_no_gradient_has_a_factor_of_any_axis_full(name):
    check_gradients(name)


@pytest.mark.parametrize("remat", ["block", "stage", pytest.param("dots", marks=pytest.mark.full)])
def test_no_gradient_has_a_factor_of_any_axis_whatever_is_computed_again(remat):
    check_gradients("pipe2_data2_tensor2", remat=remat, microbatches=4, zero=2)


# ---- gradients inside a layer


@jax.custom_vjp
def times(x, gain):
    return x * gain


def times_back(saved, g):
    x, gain = saved
    return g * gain, jnp.sum(g * x)


times.defvjp(lambda x, gain: (x * gain, (x, gain)), times_back)


class Gain(nnx.Module):
    def __init__(self):
        self.gain = param(jnp.ones(2), ("layers",))


class Dot(nnx.Module):
    """x[b, t] = tokens[b, t] * weight[t], then two layers that multiply by 1."""

    def __init__(self, key=None):
        self.weight = param(jnp.float32([1, 2]), (None,))
        self.layers = Gain()

    def embed(self, batch):
        return batch["tokens"] * self.weight[...]

    def block(self, layer, x, batch):
        return times(x, layer.gain[...])


# jax-ml/jax#36886: every shard got the sum over all shards
@pytest.mark.parametrize("name", ["one", "data2", "pipe2_data2"])
def test_value_and_grad_returns_the_gradient_summed_over_all_rows_once(name):
    sizes = {"one": {}, "data2": dict(data=2), "pipe2_data2": dict(pipe=2, data=2)}[name]
    tokens = np.int32([[0, 1], [1, 1], [1, 0], [0, 0]])
    batch = dict(tokens=tokens, targets=tokens, weights=np.ones((4, 2), np.float32))
    settings = jp.Layout(**sizes, precision="fp32", microbatches=2)
    value, found = gradients(Dot, lambda model, x, batch: (jnp.sum(x), None), settings, batch)
    assert value == 2 * 1 + 2 * 2
    assert found.weight[...].tolist() == [2, 2]
    assert found.layers.gain[...].tolist() == [6, 6]


# pytorch/torchtitan#4332: the bias was divided by the size of tensor, its gradient too
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_row_layer_adds_its_bias_once_and_its_gradient_counts_every_token(sequence_parallel):
    mesh = jp.make_mesh(jp.Layout(tensor=4), jax.devices()[:4])
    layer = RowLinear((8,), ("ffn",), 3, key=jax.random.key(0), std=0.5, bias=True)
    layer.bias.set_value(jnp.float32([1, 2, 3]))
    x = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)
    settings = {"settings": Settings(sequence_parallel=sequence_parallel)}
    seq = "tensor" if sequence_parallel else None
    split = jax.tree.unflatten(jax.tree.structure(layer), [P(), P("tensor")])  # bias, weight

    @partial(jax.shard_map, mesh=mesh, in_specs=(split, P(None, None, "tensor")),
             out_specs=P(None, seq))  # fmt: skip
    def parallel(layer, x):
        return layer(x, settings)

    loss = lambda layer, function: jnp.sum(function(layer, x))  # noqa: E731
    value, found = jax.value_and_grad(loss)(layer, parallel)
    want_value, want = jax.value_and_grad(loss)(layer, lambda layer, x: layer(x, {}))
    np.testing.assert_allclose(parallel(layer, x), layer(x, {}), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert found.bias[...].tolist() == [32, 32, 32]  # 2 rows of 16 tokens
    assert_close(found, want)


# ---- copies of a parameter


def compare_copies(tree) -> int:
    """Copies of every piece of every array are bit-equal; returns how many were compared."""
    compared = 0
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            other = first.setdefault(str(shard.index), data)
            np.testing.assert_array_equal(other, data, err_msg=jax.tree_util.keystr(keys))
            compared += other is not data
    return compared


# openxla/xla#40034, NVIDIA/Megatron-LM#1446, NVIDIA/TransformerEngine#441: copies drifted apart
@pytest.mark.parametrize(
    "sizes, copies",
    [
        (dict(tensor=4), 5),  # two norms, qk-norm's two, the final norm
        pytest.param(dict(pipe=2, data=2, tensor=2, microbatches=2), 1, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_copies_of_every_parameter_and_moment_are_bit_equal_after_each_step(sizes, copies):
    name = with_layers("llama_tied", 2)
    settings = jp.Layout(**sizes, precision="fp32")
    plan = jp.make_plan(settings, state_init(name), devices=jax.devices()[: settings.num_devices])
    step, state = plan.train_step(optimizer(), MODELS[name][0].loss), None
    state = place(plan, jax.tree.map(np.copy, initial_state(name)))
    for seed in range(5):
        state, _ = step(state, ragged_batch(64, 8, seed))
        assert compare_copies(state) >= 3 * copies * 3  # parameters and two moments


@pytest.mark.parametrize("name", ["data4_zero0", "replica2_data2_tensor2"])
def test_copies_are_bit_equal_where_whole_copies_are_asked_for(name):
    settings = layout(name)
    plan = jp.make_plan(settings, random_squares(), devices=jax.devices()[: settings.num_devices])
    model = place(plan, random_squares()())
    _, found = jax.jit(plan.value_and_grad(mean_loss))(model, numbered_batch())
    assert compare_copies(found) >= settings.num_devices


# jax-ml/jax#20088: emulated CPU devices returned garbage with donation; leaves of 1 and 2 numbers
@pytest.mark.parametrize("name", ["data4_zero1", "pipe2_data2_tensor2"])
def test_steps_with_and_without_donation_are_bit_equal(name):
    tx = optax.adamw(1e-2)
    init = random_squares(4)

    def both(key=None):
        return init(), tx.init(init())

    settings = dataclasses.replace(layout(name), microbatches=2)
    plan = jp.make_plan(settings, both, devices=jax.devices()[: settings.num_devices])
    donated = plan.train_step(tx, mean_loss)
    kept = jax.jit(donated.__wrapped__, out_shardings=(plan.shardings, None))
    ends = []
    for step in (donated, kept):
        state = place(plan, both())
        for _ in range(10):
            old = state
            state, metrics = step(state, numbered_batch())
            assert all(leaf.is_deleted() == (step is donated) for leaf in jax.tree.leaves(old[0]))
            assert compare_copies(state) >= settings.num_devices
        ends.append(jax.device_get((state, metrics["loss"])))
    jax.tree.map(np.testing.assert_array_equal, *ends)
