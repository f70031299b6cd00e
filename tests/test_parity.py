"""Any layout, the same numbers: loss, every gradient and three AdamW steps equal one device."""

import itertools

import jax
import numpy as np
import pytest

import jaxpar as jp
from layouts import (
    LAYOUTS,
    MODELS,
    assert_equal_runs,
    model_init,
    ragged_batch,
    reference,
    run_layout,
)


def cases():
    """Every model on every layout, stage and number of microbatches; with kv heads fewer than
    tensor on tensor=8."""
    names = ("llama", "llama_tied", "gpt2")
    for name, layout, zero, m in itertools.product(names, LAYOUTS, range(4), (1, 4)):
        yield ("llama_kv2" if (name, layout) == ("llama", "tensor8") else name), layout, zero, m


COVERING = [
    ("llama", "data8", 0, 4),
    ("llama_tied", "data8", 3, 1),
    ("gpt2", "tensor4", 1, 1),
    ("llama_kv2", "tensor8", 2, 4),
    ("llama_tied", "data2_tensor4", 2, 4),
    ("gpt2", "data2_tensor4", 3, 4),
    ("llama", "replica2_data2_tensor2", 3, 4),
    ("gpt2", "replica2_data2_tensor2", 1, 4),
    ("llama_tied", "replica2_data2_tensor2", 2, 1),
]


def check(name, layout, zero, microbatches, **more):
    layout = jp.Layout(
        **LAYOUTS[layout], zero=zero, microbatches=microbatches, precision="fp32", **more
    )
    assert_equal_runs(name, run_layout(name, layout), reference(name))


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_three_steps_equal_one_device(case):
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in cases() if c not in COVERING], ids=str)
def test_three_steps_equal_one_device_full(case):
    check(*case)


@pytest.mark.parametrize("remat", ["block", "dots", "offload"])
def test_remat_changes_no_number(remat):
    check("llama_tied", "data2_tensor4", 3, 1, remat=remat)


def test_without_sequence_parallelism_equals_one_device():
    check("llama_tied", "data2_tensor4", 2, 1, sequence_parallel=False)


def test_packed_documents_equal_one_device():
    layout = jp.Layout(data=2, tensor=4, zero=3, microbatches=4, precision="fp32")
    got = run_layout("llama", layout, packed=True)
    assert_equal_runs("llama", got, reference("llama", packed=True))


def test_bf16_equals_one_device_to_bf16_accuracy():
    layout = jp.Layout(data=2, tensor=4, zero=3, microbatches=4, precision="bf16")
    got, want = run_layout("llama", layout), reference("llama")
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=2e-2)
    for a, b in zip(
        jax.tree.leaves(got["gradients"]), jax.tree.leaves(want["gradients"]), strict=True
    ):
        assert a.dtype == np.float32
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("layout", ["data8", "replica2_data2_tensor2"])
def test_initial_parameters_do_not_depend_on_the_layout(layout):
    plan = jp.make_plan(jp.Layout(**LAYOUTS[layout], zero=3), model_init("llama_tied"))
    got = jax.device_get(plan.init(jax.random.key(3)))
    want = jax.jit(model_init("llama_tied"))(jax.random.key(3))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_replicas_of_every_parameter_are_bit_identical_after_a_step():
    layout = jp.Layout(replica=2, data=2, tensor=2, zero=1, precision="fp32", microbatches=2)
    module, config = MODELS["llama_tied"]
    plan = jp.make_plan(layout, model_init("llama_tied"))
    _, gradients = jax.jit(plan.value_and_grad(module.loss))(
        plan.init(jax.random.key(0)), ragged_batch(config.vocab_size)
    )
    compared = 0
    for leaf in jax.tree.leaves(gradients):
        pieces = {}
        for shard in leaf.addressable_shards:
            same = pieces.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(same, np.asarray(shard.data))
            compared += same is not np.asarray(shard.data)
    assert compared > 0
