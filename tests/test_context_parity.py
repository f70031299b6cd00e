"""Long sequences split over context: the numbers of one device, whatever the variant and order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.loss import cross_entropy
from layouts import (
    MODELS,
    VALID,
    assert_equal_runs,
    initial_state,
    leaf_names,
    model_init,
    ragged_batch,
    reference,
    reference_loss,
    run_layout,
)

LAYOUTS = {
    "context4": dict(context=4),
    "context8": dict(context=8),
    "data2_context2_tensor2": dict(data=2, context=2, tensor=2),
    "pipe2_context2_tensor2": dict(pipe=2, context=2, tensor=2, microbatches=4),
    "pipe2_data2_context2": dict(pipe=2, data=2, context=2, microbatches=4),
}
BOTH = dict(attention="ring+ulysses", ulysses=2)


def check(name, packed=True, **settings):
    layout = jp.Layout(**settings, precision="fp32")
    assert_equal_runs(name, run_layout(name, layout, packed=packed), reference(name, packed=packed))


COVERING = [("context4", 1), ("context8", 3), ("data2_context2_tensor2", 3),
            ("pipe2_context2_tensor2", 0), ("pipe2_data2_context2", 1)]  # fmt: skip


@pytest.mark.parametrize("layout, zero", COVERING)
def test_three_steps_on_packed_rows_equal_one_device(layout, zero):
    check("llama", zero=zero, **LAYOUTS[layout])


@pytest.mark.full
@pytest.mark.parametrize("layout, zero", [
    (layout, zero) for layout in LAYOUTS for zero in (0, 1, 3) if (layout, zero) not in COVERING
])  # fmt: skip
def test_three_steps_on_packed_rows_equal_one_device_full(layout, zero):
    check("llama", zero=zero, **LAYOUTS[layout])


MORE = [
    ("llama_kv2", dict(context=4, data=2, attention="ulysses", zero=2, microbatches=2)),
    ("gpt2", dict(context=2, pipe=2, attention="allgather", microbatches=4, remat="block")),
    ("llama_tied", dict(context=4, pipe=2, microbatches=4, remat="stage", **BOTH)),
    ("llama", dict(context=2, pipe=2, microbatches=4, layers_per_stage=(3, 1), remat="dots")),
    ("gpt2", dict(context=4, context_order="document", zero=2)),
]
FULL = [
    ("llama", dict(context=4, context_order="contiguous", remat="offload")),
    ("llama_tied", dict(context=2, tensor=4, sequence_parallel=False)),
    ("llama", dict(context=2, pipe=2, data=2, schedule="interleaved", chunks=2, microbatches=4)),
    ("gpt2", dict(context=8, attention="ulysses", zero=3)),
    ("llama_kv2", dict(context=8, attention="ring+ulysses", ulysses=4, zero=1)),
    ("llama_kv2", dict(context=2, tensor=4, attention="ulysses", zero=3, microbatches=4)),
    ("llama", dict(context=2, replica=2, data=2, zero=3, remat="block", microbatches=2)),
    ("llama", dict(context=2, pipe=4, schedule="gpipe", microbatches=4, attention="allgather")),
    ("llama_tied", dict(context=2, pipe=2, tensor=2, attention="ulysses", microbatches=2, zero=3)),
]


@pytest.mark.parametrize("name, settings", MORE, ids=str)
def test_every_variant_and_order_equals_one_device(name, settings):
    check(name, **settings)


@pytest.mark.full
@pytest.mark.parametrize("name, settings", FULL, ids=str)
def test_every_variant_and_order_equals_one_device_full(name, settings):
    check(name, **settings)


def gradients(name, layout, batch, loss=None, key=None, **changes):
    """(loss, gradients in the model's own order) under a layout."""
    module, config = MODELS[name]
    plan = jp.make_plan(
        layout,
        lambda key: module.Model(dataclasses.replace(config, **changes), rngs=nnx.Rngs(key)),
        devices=jax.devices()[: layout.num_devices],
    )
    leaves = jax.tree.leaves(initial_state(name)[0])
    model = jax.tree.structure(plan.state).unflatten(leaves)
    stored = jax.device_put(plan.stored(model), plan.shardings)
    value, found = jax.jit(plan.value_and_grad(loss or module.loss))(stored, batch, key)
    return value, jax.device_get(plan.canonical(found)), model


def assert_close(found, want):
    for leaf, a, b in zip(
        leaf_names(want), jax.tree.leaves(found), jax.tree.leaves(want), strict=True
    ):
        scale = np.abs(b).max()
        assert np.abs(a - b).max() <= 1e-5 * scale, leaf


def compare(name, layout, batch, key=None, **changes):
    value, found, model = gradients(name, layout, batch, key=key, **changes)
    want_value, want = jax.jit(jax.value_and_grad(reference_loss))(model, batch, key)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_close(found, jax.device_get(want))
    return value


@pytest.mark.parametrize("settings", [
    dict(context=4), dict(context=4, attention="ulysses"), dict(context=4, **BOTH),
    dict(context=2, data=2, tensor=2, attention="allgather"), dict(pipe=2, data=2, tensor=2),
], ids=str)  # fmt: skip
def test_a_sliding_window_is_that_of_one_device(settings):
    layout = jp.Layout(**settings, precision="fp32")
    batch = ragged_batch(64, 8, packed=settings != dict(context=4))
    value = compare("llama", layout, batch, sliding_window=7)
    without = jax.jit(reference_loss)(initial_state("llama")[0], batch)
    assert abs(value - without) > 1e-4


# haoliuhl/ringattention#9
@pytest.mark.parametrize("order", ["zigzag", "document"])
def test_three_devices_and_a_sequence_of_24_equal_one_device(order):
    rng = np.random.default_rng(0)
    batch = {k: np.concatenate([v, v[:, :8]], axis=1) for k, v in ragged_batch(64, 4).items()}
    batch["segment_ids"] = np.sort(rng.integers(0, 4, (4, 24)), axis=1).astype(np.int32)
    layout = jp.Layout(context=3, data=2, context_order=order, precision="fp32")
    compare("llama", layout, batch)


# NVIDIA/Megatron-LM#906, #673: gradients were off by the context size
def test_context_and_data_scale_gradients_alike_with_mean_and_sum_losses():
    batch = ragged_batch(64, 8)
    by_sum = lambda model, x, b: (model.loss(x, b)[0], None)  # noqa: E731
    for loss in (None, by_sum):
        found = [gradients("llama", jp.Layout(**sizes, precision="fp32"), batch, loss)[:2]
                 for sizes in (dict(data=2, context=4), dict(data=8))]  # fmt: skip
        np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
        assert_close(found[0][1], found[1][1])
    total = reference_loss(initial_state("llama")[0], batch) * sum(VALID)
    np.testing.assert_allclose(found[0][0], total, rtol=1e-5)


# NVIDIA-NeMo/Megatron-Bridge PR#3117: padding that divides the sequence poisoned the loss
@pytest.mark.parametrize("order", ["zigzag", "contiguous", "document"])
def test_a_row_of_13_padded_to_16_counts_13_even_where_padding_is_infinite(order):
    layout = jp.Layout(context=4, context_order=order, precision="fp32")
    short = {name: a[:, :13] for name, a in ragged_batch(64, 8, packed=True).items()}
    batch = jp.pad_batch(short, layout)
    assert {a.shape for a in batch.values()} == {(8, 16)} and batch["segment_ids"][0, -1] == -1

    def loss(model, x, batch):
        padding = (batch["places"] >= 13)[..., None]
        x = jnp.where(padding, jnp.inf, model.norm(x))
        return cross_entropy(x, model.head_table(), batch, model.config.vocab_size)

    value, found, model = gradients("llama", layout, batch, loss)
    want_value, want = jax.jit(jax.value_and_grad(reference_loss))(model, short)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_close(found, jax.device_get(want))


# pytorch/pytorch#152261: results came back in the order of the split
@pytest.mark.parametrize("settings", [
    dict(context=4), dict(context=4, context_order="contiguous"),
    dict(context=2, pipe=2, tensor=2, microbatches=2, context_order="document", zero=3),
], ids=str)  # fmt: skip
def test_logits_and_token_losses_come_back_in_the_rows_own_order(settings):
    batch = ragged_batch(61, 8, packed=True)
    layout = jp.Layout(**settings, precision="fp32")
    plan = jp.make_plan(layout, model_init("gpt2"), devices=jax.devices()[: layout.num_devices])
    model = initial_state("gpt2")[0]
    stored = jax.device_put(plan.stored(model), plan.shardings)
    for name, dims in (("token_losses", ("batch", "seq")), ("logits", ("batch", "seq", "vocab"))):
        function = lambda model, x, batch, name=name: getattr(model, name)(x, batch)  # noqa: E731
        found = jax.jit(plan.outputs(function, dims))(stored, batch)
        want = reference_loss(model, batch, module_loss=lambda *a, f=function: (f(*a), 1))
        assert found.shape == want.shape
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


# pytorch/torchtitan PR#3111: a metric of each device, off by the context size
def test_a_metric_of_each_device_is_divided_by_its_own_count_and_0_where_it_has_none():
    batch = ragged_batch(64, 8)  # row 3 counts nothing, row 1 its first token alone
    layout = jp.Layout(context=4, context_order="contiguous", precision="fp32")
    plan = jp.make_plan(layout, model_init("llama"), devices=jax.devices()[:4])
    model = initial_state("llama")[0]

    def mean(model, x, batch):
        losses, weights = model.token_losses(x, batch), batch["weights"]
        total, count = ((a * weights).sum(axis=1, keepdims=True) for a in (losses, 1))
        return jnp.broadcast_to(total / jnp.maximum(count, 1), weights.shape)

    stored = jax.device_put(plan.stored(model), plan.shardings)
    found = jax.jit(plan.outputs(mean))(stored, batch)[:, ::4]
    losses = reference_loss(model, batch, module_loss=lambda m, x, b: (m.token_losses(x, b), 1))
    sums, counts = (np.asarray(a).reshape(8, 4, 4).sum(axis=2) for a in (losses, batch["weights"]))
    np.testing.assert_allclose(found, sums / np.maximum(counts, 1), rtol=1e-5)
    assert (np.asarray(found)[counts == 0] == 0).all() and (counts == 0).sum() > 8


# NVIDIA/Megatron-LM#1256, tenstorrent/tt-metal#55947
@pytest.mark.parametrize("settings", [
    dict(data=2, tensor=2, context=2), dict(context=4, context_order="document", remat="block"),
], ids=str)  # fmt: skip
def test_dropout_draws_the_masks_of_one_device(settings):
    layout = jp.Layout(**settings, precision="fp32")
    compare("llama", layout, ragged_batch(64, 8, packed=True), key=jax.random.key(3), dropout=0.1)


def test_bf16_equals_one_device_to_bf16_accuracy():
    layout = jp.Layout(context=4, data=2, zero=3, precision="bf16")
    got, want = run_layout("llama", layout, packed=True), reference("llama", packed=True)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=2e-2)
    for a, b in zip(
        jax.tree.leaves(got["gradients"]), jax.tree.leaves(want["gradients"]), strict=True
    ):
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("settings, sentence", [
    (dict(context=4), "seq_len 13 is not a multiple of 8, which it must be for context=4 in zigzag "
                      "order, two pieces a device; use 8 or 16, or pad the batch with"),
    (dict(context=4, attention="ulysses"), "seq_len 13 is not a multiple of 4, .*use 12 or 16"),
    (dict(context=2, tensor=4), "seq_len 13 is not a multiple of 8, .* and tensor=4, over which"),
], ids=str)  # fmt: skip
def test_a_sequence_that_does_not_divide_is_refused_with_the_nearest(settings, sentence):
    layout = jp.Layout(**settings)
    plan = jp.make_plan(layout, model_init("llama"), devices=jax.devices()[: layout.num_devices])
    batch = {name: a[:, :13] for name, a in ragged_batch(64, 8).items()}
    with pytest.raises(ValueError, match=sentence):
        plan.value_and_grad(MODELS["llama"][0].loss)(initial_state("llama")[0], batch)


@pytest.mark.parametrize("settings, sentence", [
    (dict(context=6, attention="ulysses"), "6 devices of context=6 exchange heads, and each has 8 "
                                           "heads and 4 kv heads: .*with ulysses=2, or 'ring'"),
    (dict(context=6, attention="ring+ulysses", ulysses=3), "3 devices of context=6 exchange heads"),
], ids=str)  # fmt: skip
def test_heads_that_cannot_be_exchanged_are_refused_when_planned(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        jp.make_plan(jp.Layout(**settings), model_init("llama"), devices=jax.devices()[:6])


@pytest.mark.parametrize("settings, sentence", [
    (dict(context=4, ulysses=2), "ulysses=2 needs attention='ring.ulysses', .*is 'ring'"),
    (dict(context=2, attention="ring+ulysses"), "splits context=2 into .*use ring or"),
    (dict(context=8, attention="ring+ulysses", ulysses=3), "use ulysses=2 or 4"),
    (dict(context=2, pipe=2, idle="skip"), "idle='skip' with pipe=2 and .*'ring': .*'auto'"),
    (dict(context=2, attention="rings"), "attention='rings' is not a choice; did you mean 'ring'"),
    (dict(ulysses=-1), "ulysses=-1 is not a number of devices"),
], ids=str)  # fmt: skip
def test_settings_that_cannot_work_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        jp.Layout(**settings)


def test_the_number_of_devices_that_exchange_heads_is_chosen_without_copies_of_kv_heads():
    layout = jp.Layout(context=8, attention="ring+ulysses")
    assert jp.make_plan(layout, model_init("llama")).layout.ulysses == 4
    assert jp.make_plan(layout, model_init("llama_kv2")).layout.ulysses == 2
