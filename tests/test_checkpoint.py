"""What a checkpoint gives back: the same numbers, on any mesh, or an error."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.checkpoint import Checkpoint
from layouts import MODELS, optimizer, ragged_batch, state_init

DATA8 = jp.Layout(data=8, precision="fp32")
OTHERS = {
    "data2_tensor4_zero3": jp.Layout(data=2, tensor=4, zero=3, precision="fp32"),
    "one_device": jp.Layout(precision="fp32"),
    "pipe2_chunks2_data2": jp.Layout(pipe=2, chunks=2, microbatches=2, schedule="interleaved",
                                     data=2, zero=2, precision="fp32"),
    "context4_data2_zero3": jp.Layout(context=4, data=2, zero=3, precision="fp32"),
}  # fmt: skip


def plan_of(layout, init=None):
    devices = jax.devices()[: layout.num_devices]
    return jp.make_plan(layout, init or state_init("llama"), devices=devices)


def numbers(state) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(state)]


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def batch(step: int) -> dict:
    return ragged_batch(MODELS["llama"][1].vocab_size, rows=8, seed=step)


@pytest.fixture(scope="module")
def plan():
    return plan_of(DATA8)


@pytest.fixture(scope="module")
def step(plan):
    return plan.train_step(optimizer())


@pytest.fixture(scope="module")
def trained(plan, step):
    """The state after 3 steps on data=8, as numpy arrays in the state's tree."""
    state = plan.init(jax.random.key(0))
    for i in range(3):
        state, _ = step(state, batch(i))
    return jax.tree.map(np.array, state)


@pytest.fixture(scope="module")
def saved(plan, trained, tmp_path_factory):
    """A directory with that state."""
    directory = tmp_path_factory.mktemp("run") / "checkpoint"
    with Checkpoint(directory, plan) as checkpoint:
        assert checkpoint.save(3, jax.device_put(trained, plan.shardings))
    return directory


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_saved_on_data8_is_bit_equal_on_another_mesh(name, saved, trained):
    plan = plan_of(OTHERS[name])
    with Checkpoint(saved, plan) as checkpoint:
        state, step = checkpoint.restore()
    assert step == 3
    assert_same(numbers(plan.canonical(state)), numbers(trained))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(plan.shardings), strict=True):
        assert leaf.sharding == sharding and leaf.committed


def test_restoring_puts_only_its_own_pieces_on_each_device(saved):
    plan = plan_of(OTHERS["data2_tensor4_zero3"])
    with Checkpoint(saved, plan) as checkpoint:
        state, _ = checkpoint.restore()
    fresh = plan.init(jax.random.key(0))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        assert a.addressable_shards[0].data.nbytes == b.addressable_shards[0].data.nbytes


def test_seven_steps_a_restart_and_thirteen_equal_twenty_and_compile_once(tmp_path, plan, step):
    state = plan.init(jax.random.key(0))
    for i in range(20):
        state, _ = step(state, batch(i))
    unbroken = numbers(state)

    state = plan.init(jax.random.key(0))
    with Checkpoint(tmp_path, plan, every=7) as checkpoint:
        for i in range(7):
            state, _ = step(state, batch(i))
            checkpoint.save(i + 1, state)
        assert checkpoint.steps() == [7]
    del state
    with Checkpoint(tmp_path, plan_of(DATA8)) as checkpoint:
        state, start = checkpoint.restore()
    for i in range(start, 20):
        state, _ = step(state, batch(i))
    assert_same(numbers(state), unbroken)
    assert step._cache_size() == 1


def test_a_restored_state_can_be_donated(saved, plan, step):
    with Checkpoint(saved, plan) as checkpoint:
        state, _ = checkpoint.restore()
    leaves = jax.tree.leaves(state)
    step(state, batch(0))
    assert all(leaf.is_deleted() for leaf in leaves)


def test_what_is_saved_is_the_state_at_the_call_though_its_arrays_are_donated(
    tmp_path, plan, step, trained
):
    state = jax.device_put(trained, plan.shardings)
    state = jax.tree.map(jnp.copy, state)
    with Checkpoint(tmp_path, plan) as checkpoint:
        checkpoint.save(3, state)
        for i in range(5):
            state, _ = step(state, batch(i))
        checkpoint.wait()
        back, _ = checkpoint.restore()
    assert_same(numbers(back), numbers(trained))


def test_the_file_is_a_plain_nested_dict_that_needs_no_plan(saved, trained):
    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore(saved / "3" / "default")
    np.testing.assert_array_equal(tree["0"]["embedding"]["table"], trained[0].embedding.table[...])
    moments = tree["1"]["1"]["0"]
    assert sorted(moments) == ["count", "mu", "nu"] and int(moments["count"]) == 3
    up = trained[0].layers.mlp.up.weight[...]
    assert moments["mu"]["layers"]["mlp"]["up"]["weight"].shape == up.shape


def other_model(**changes):
    module, config = MODELS["llama"]

    def init(key):
        model = module.Model(dataclasses.replace(config, **changes), rngs=nnx.Rngs(key))
        return model, optimizer().init(model)

    return init


def sgd(key):
    model = state_init("llama")(key)[0]
    return model, optax.sgd(0.1).init(model)


def halved(key):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x,
                        state_init("llama")(key))  # fmt: skip


@pytest.mark.parametrize(
    "init, words",
    [
        (other_model(vocab_size=72),
         ["0.embedding.table: saved float32[64, 32], expected float32[72, 32]"]),
        (other_model(qk_norm=True), ["query_norm", "not saved, expected float32[4, 4]"]),
        (sgd, ["1.1.0.count: saved int32[], expected nothing", "more"]),
        (halved, ["saved float32[64, 32], expected bfloat16[64, 32]"]),
    ],
    ids=["shape", "missing", "extra", "dtype"],
)  # fmt: skip
def test_another_shape_tree_or_type_is_an_error_that_names_path_saved_and_expected(
    init, words, saved
):
    with Checkpoint(saved, plan_of(DATA8, init)) as checkpoint:
        with pytest.raises(ValueError) as error:
            checkpoint.restore()
    for word in words:
        assert word in str(error.value)


def test_every_and_force_say_when_it_saves_and_keep_how_many_stay(tmp_path, plan, trained):
    state = jax.device_put(trained, plan.shardings)
    with Checkpoint(tmp_path, plan, every=2, keep=2) as checkpoint:
        saved = [step for step in range(1, 8) if checkpoint.save(step, state)]
        assert saved == [2, 4, 6]
        assert checkpoint.save(7, state, force=True)
        assert not checkpoint.save(7, state, force=True)
        checkpoint.wait()
        assert checkpoint.steps() == [6, 7]
        assert checkpoint.restore(6)[1] == 6
        with pytest.raises(ValueError, match=r"no step 4; it has \[6, 7\]"):
            checkpoint.restore(4)


def test_a_directory_of_another_run_is_never_written_over(saved, plan, trained):
    state = jax.device_put(trained, plan.shardings)
    with Checkpoint(saved, plan) as checkpoint:
        for step in (1, 3):
            with pytest.raises(ValueError, match="already holds step 3 of another run"):
                checkpoint.save(step, state)
        assert checkpoint.steps() == [3]


def test_nothing_is_made_before_the_first_save(tmp_path, plan):
    checkpoint = Checkpoint(tmp_path / "new", plan)
    assert checkpoint.restore() is None
    assert checkpoint.steps() == []
    checkpoint.close()
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_was_not_finished_is_not_seen(tmp_path, plan):
    part = tmp_path / "9.orbax-checkpoint-tmp"
    part.mkdir()
    (part / "piece").write_bytes(b"half")
    assert Checkpoint(tmp_path, plan).restore() is None


@pytest.mark.parametrize("setting", [dict(every=0), dict(keep=0), dict(every=2.5)])
def test_a_wrong_interval_is_refused(setting, tmp_path, plan):
    with pytest.raises(ValueError, match="use a whole number from 1 up"):
        Checkpoint(tmp_path, plan, **setting)


def test_a_file_is_no_directory(tmp_path, plan):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        Checkpoint(tmp_path / "file", plan)
