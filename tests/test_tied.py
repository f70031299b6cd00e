"""A table used twice is one parameter: one gradient, one optimizer state, one part of the norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from layouts import ragged_batch
from small import Tied, assert_close, gradients, layout, own_loss, tied_on_one_device, trainer

LAYOUTS = ["data8", "pipe2_interleaved", "pipe2_data2_tensor2"]
MORE = ["tensor4", "pipe4", "pipe4_gpipe", "data4_zero3",
        "pipe2_data4_zero3", "replica2_data2_tensor2"]  # fmt: skip
STEPS = 5


def batches(count=STEPS):
    return [ragged_batch(13, 8, seed) for seed in range(count)]


def tied(key=None):
    return Tied(jax.random.key(1))


@functools.cache
def by_hand():
    """Five steps on one device: (norms, table, scale); the first gradients of both uses."""
    model = tied()
    params = {"scale": model.layers.scale[...], "table": model.embedding.table[...]}
    tx = optax.adam(1e-2)
    uses = jax.jit(jax.grad(tied_on_one_device, argnums=(0, 1, 2)))
    opt_state, norms, first = tx.init(params), [], None
    for batch in batches():
        lookup, head, scale = uses(params["table"], params["table"], params["scale"], batch)
        first = (lookup, head) if first is None else first
        found = {"scale": scale, "table": lookup + head}
        norms.append(float(optax.tree.norm(found)))
        updates, opt_state = tx.update(found, opt_state, params)
        params = optax.apply_updates(params, updates)
    return norms, params, first


def check(name):
    norms, params, _ = by_hand()
    run = trainer(tied, own_loss, layout(name), optax.adam(1e-2))
    (model, _), metrics = run(batches())
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], norms, rtol=1e-5)
    np.testing.assert_allclose(model.embedding.table[...], params["table"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.layers.scale[...], params["scale"], rtol=1e-4, atol=1e-5)


# uw-syfi/piper#13: copies on the first and the last stage were never summed
@pytest.mark.parametrize("name", ["pipe2_interleaved", "pipe4"])
def test_the_tables_gradient_is_the_sum_of_both_uses_wherever_they_are(name):
    _, _, (lookup, head) = by_hand()
    _, found = gradients(tied, own_loss, layout(name), batches(1)[0])
    assert_close(found.embedding.table[...], lookup + head)


@pytest.mark.parametrize("name", LAYOUTS)
def test_five_steps_of_a_tied_table_equal_one_device(name):
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_five_steps_of_a_tied_table_equal_one_device_full(name):
    check(name)


def test_both_uses_have_a_gradient_of_their_own():
    _, _, (lookup, head) = by_hand()
    assert np.abs(lookup).max() > 1e-3 and np.abs(head).max() > 1e-3
    assert np.abs(lookup - head).max() > 1e-3


def test_a_tied_table_is_one_leaf_of_the_model_and_of_each_moment():
    tx = optax.adam(1e-2)
    plan = jp.make_plan(layout("pipe2_data2_tensor2"), lambda key: (tied(), tx.init(tied())))
    names = [split.path for split in plan.splits if "table" in split.path]
    assert len(names) == 3
    assert str(plan).count("embedding.table") == 1


# ---- one array under two names


class Untied(Tied):
    """A head of its own, which `make` fills."""

    def __init__(self, make):
        super().__init__(jax.random.key(1))
        self.head = make(self.embedding.table)

    def loss(self, x, batch):
        return jnp.sum(x @ self.head[...].T), None


def same_array(table):
    return jp.nn.param(table.get_value(), ("vocab", "embed"))


# google/flax#5461: donated twice, the step failed (on several CPU devices the process dies)
@pytest.mark.parametrize("make", [lambda table: table, same_array], ids=["parameter", "array"])
def test_a_head_that_is_the_very_array_of_the_embedding_is_refused_when_planned(make):
    words = "embedding.table and head are the very same array.*tie_embeddings=True.*jnp.copy"
    with pytest.raises(ValueError, match=words):
        jp.make_plan(layout("data8"), lambda key: Untied(make))


def test_a_state_from_elsewhere_with_one_array_twice_is_refused_when_stored():
    plan = jp.make_plan(layout("data8"), lambda key: (tied(), tied()))  # such as an average of it
    model = tied()
    with pytest.raises(ValueError, match="0.embedding.table and 1.embedding.table are the very"):
        plan.stored((model, model))
    plan.stored((model, jax.tree.map(jnp.copy, model)))


def test_a_copy_of_the_embedding_is_a_head_that_trains_on_its_own():
    def both(key=None):
        return Untied(lambda table: jp.nn.param(jnp.copy(table[...]), ("vocab", "embed")))

    run = trainer(both, own_loss, layout("data4_zero0"), optax.sgd(1e-3))
    (model, _), metrics = run(batches(2))
    assert len(metrics) == 2
    assert np.abs(model.head[...] - model.embedding.table[...]).max() > 0
