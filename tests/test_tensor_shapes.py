"""Sizes that no axis divides: exact, with padding nobody sees, or refused with the numbers."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from compiled import compiled
from jaxpar import loss as losses
from jaxpar.nn import Settings
from layouts import MODELS, initial_state, ragged_batch, reference_loss, with_layers
from small import (
    Tied,
    assert_close,
    gradients,
    mean_loss,
    numbered_batch,
    own_loss,
    place,
    random_squares,
    tied_on_one_device,
)


def plan_of(settings, name="llama", **changes):
    module, config = MODELS[name]
    config = dataclasses.replace(config, **changes)
    return jp.make_plan(
        jp.Layout(**settings, precision="fp32"),
        lambda key: module.Model(config, rngs=nnx.Rngs(key)),
        devices=jax.devices()[: jp.Layout(**settings).num_devices],
    )


# pytorch/torchtitan#2574, huggingface/transformers#48307: 8 heads, 2 kv heads on tensor=4
def test_two_kv_heads_on_four_devices_are_exact_and_their_gradients_summed_over_copies():
    name = with_layers("llama_kv2", 1)
    layout = jp.Layout(data=2, tensor=4, zero=3, precision="fp32")
    run = compiled("llama_kv2", layout, rows=8, num_layers=1)
    batch, (model, _) = ragged_batch(64, 8), initial_state(name)
    placed = jax.device_put(batch, run.plan.batch_sharding)
    value, found = jax.device_get(run.program(place(run.plan, model), placed))
    want_value, want = jax.jit(jax.value_and_grad(reference_loss))(model, batch)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert found.layers.attention.key.weight[...].shape == (1, 32, 2, 4)
    assert_close(found, jax.device_get(want))


@pytest.mark.parametrize(
    "settings, changes, sentence",
    [
        (dict(tensor=4), dict(num_heads=6, num_kv_heads=2),
         r"attention.out.weight .*: heads=6 does not split over tensor=4 .* one of 1, 2, 3, 6"),
        (dict(tensor=2), dict(num_heads=6, num_kv_heads=3),
         r"attention.key.weight .*: kv_heads=3 does not split over tensor=2 .* one of 1, 3 \(or a"),
        (dict(tensor=4), dict(ffn_dim=66),
         r"mlp.down.weight .*: ffn=66 does not split over tensor=4 .* one of 1, 2, 3, 6, 11"),
    ],
    ids=["heads", "kv heads", "ffn"],
)  # fmt: skip
def test_a_dim_that_does_not_split_is_refused_with_parameter_size_axis_and_valid_sizes(
    settings, changes, sentence
):
    with pytest.raises(ValueError, match=sentence):
        plan_of(settings, **changes)


# marin-community/levanter#429: an embed dim that the devices do not divide
def test_a_dim_that_zero_cannot_split_stays_whole_and_the_plan_lists_it():
    plan = plan_of(dict(data=3, tensor=2, zero=3))
    lines = {line.split()[0]: line for line in str(plan).splitlines() if line.strip()}
    assert "whole on every device: no dim of (32,) divides by data=3" in lines["norm.scale"]
    assert "no dim of (4, 64, 32) divides by data=3" in lines["layers.mlp.down.weight"]
    for split, sharding in zip(plan.splits, jax.tree.leaves(plan.shardings), strict=True):
        if split.zero_dim is None:
            assert "divides by data=3" in split.note
            assert not any("data" in str(entry) for entry in sharding.spec)


def test_parameters_that_stay_whole_have_the_gradients_of_one_device():
    layout = jp.Layout(data=3, tensor=2, zero=3, precision="fp32")
    _, found = gradients(random_squares(), mean_loss, layout, numbered_batch(6))
    assert_close(found, random_squares()(), tolerance=2e-6)


# google/jax#15788: a dim that does not divide came back replicated without a word
@pytest.mark.parametrize(
    "settings", [dict(tensor=4), dict(data=2, tensor=4, zero=3), dict(pipe=2, tensor=2)], ids=str
)
def test_a_vocabulary_of_50257_is_exact_padded_where_used_and_split_where_stored(settings):
    layout = jp.Layout(**settings, precision="fp32")

    def init(key=None):
        return Tied(jax.random.key(0), vocab_size=50_257, layers=2)

    plan = jp.make_plan(layout, init, devices=jax.devices()[: layout.num_devices])
    (split,) = [s for s in plan.splits if "table" in s.path]
    assert "vocab 50257 % 4: padded to 50260 where used" in split.note and split.note in str(plan)
    model, batch = init(), ragged_batch(50_257, 8)
    value, found = jax.jit(plan.value_and_grad(own_loss))(place(plan, model), batch)
    table = found.embedding.table.get_value()
    assert table.sharding.is_equivalent_to(plan.shardings.embedding.table.get_value(), 2)
    assert table.shape == (50_257, 8)
    assert table.addressable_shards[0].data.size == 50_257 * 8 // layout.num_devices
    table, scale = model.embedding.table[...], model.layers.scale[...]
    want_value, (lookup, head) = jax.value_and_grad(tied_on_one_device, argnums=(0, 1))(
        table, table, scale, batch
    )
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_close(jax.device_get(found.embedding.table[...]), lookup + head)


def test_padding_of_the_vocabulary_takes_no_part_in_the_loss():
    mesh = jp.make_mesh(jp.Layout(tensor=4), jax.devices()[:4])
    batch = numbered_batch(2, valid=[3])
    batch |= dict(targets=batch["targets"] * 0 + 4, settings=Settings(vocab_axes=("tensor",)))
    loss_sum, count = jax.shard_map(
        lambda x, table: losses.cross_entropy(x, table, batch, 5),
        mesh=mesh, in_specs=(P(), P("tensor")), out_specs=P(),
    )(np.zeros((2, 16, 8), np.float32), np.ones((8, 8), np.float32))  # fmt: skip
    np.testing.assert_allclose(loss_sum / count, 1.609438, rtol=1e-6)  # log 5; log 8 is 2.079442


# flax#1702, google/flax#5124: wrong rules replicated in silence or failed deep inside
@pytest.mark.parametrize(
    "dims, sentence",
    [
        (("layers", "fnn"), "layers.up: there is no rule for a dim 'fnn'; did you mean 'ffn'?"),
        (("layers", "layers"), "layers.up: dims 'layers' and 'layers' of one array are both split"),
    ],
)
def test_dims_that_cannot_be_split_are_refused_with_the_parameters_path(dims, sentence):
    def init(key):
        model = random_squares()()
        model.layers.up = jp.nn.param(model.layers.up[...], dims)
        return model

    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        jp.make_plan(jp.Layout(pipe=2, tensor=2), init, devices=jax.devices()[:4])


def test_two_dims_on_tensor_are_refused():
    with pytest.raises(ValueError, match="w: dims 'heads' and 'ffn' of one array are both split"):
        jp.splits.split_param("w", (8, 8), np.float32, ("heads", "ffn"), jp.Layout(tensor=2))
