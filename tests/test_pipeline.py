"""Any schedule on any stages, the same numbers as one device."""

import itertools
import random

import jax
import numpy as np
import pytest

import jaxpar as jp
from jaxpar.pipeline import branch
from jaxpar.pipeline.schedules import B, F
from layouts import (
    MODELS,
    assert_equal_runs,
    initial_state,
    ragged_batch,
    reference,
    run_layout,
    state_init,
    with_layers,
)


def megatron_1f1b(stage, stages, microbatches, chunks):
    """The asynchronous order: P-1-s forwards, then one forward, one backward."""
    warm = min(microbatches, stages - 1 - stage)
    tasks = [F(m) for m in range(warm)]
    for m in range(microbatches):
        tasks += [F(warm + m)] if warm + m < microbatches else []
        tasks += [B(m)]
    return tasks


SCHEDULES = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved": ("interleaved", 2),
    "custom": (megatron_1f1b, 1),
}
MESHES = {
    "pipe2": (dict(pipe=2), None),
    "pipe4": (dict(pipe=4), None),
    "pipe4_5_layers": (dict(pipe=4), 5),
    "pipe4_30_layers": (dict(pipe=4), 30),
    "pipe8": (dict(pipe=8), None),
    "pipe2_data2_tensor2": (dict(pipe=2, data=2, tensor=2), None),
    "pipe2_replica2_tensor2": (dict(pipe=2, replica=2, tensor=2), None),
}
AXES = (
    tuple(SCHEDULES),
    tuple(MESHES),
    (0, 1, 2, 3),
    ("1", "2", "3", "P", "2P+1"),
    ("stage", "block", "none"),
    ("llama", "llama_tied"),
)


def fits(case) -> bool:
    schedule, mesh, *_ = case
    sizes, layers = MESHES[mesh]
    return layers is None or layers >= sizes["pipe"] * SCHEDULES[schedule][1]


def every_pair(axes) -> list[tuple]:
    """A small list of cases in which every pair of values of two axes occurs, where they fit."""
    wanted = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a in axes[i]
        for b in axes[j]
    }
    cases, rng = [], random.Random(0)
    everything = [c for c in itertools.product(*axes) if fits(c)]

    def pairs(case):
        return {
            ((i, case[i]), (j, case[j])) for i, j in itertools.combinations(range(len(case)), 2)
        }

    wanted &= set().union(*map(pairs, everything))
    while wanted:
        best = max(rng.sample(everything, 300), key=lambda c: len(pairs(c) & wanted))
        if pairs(best) & wanted:
            cases.append(best)
            wanted -= pairs(best)
    return cases


def check(schedule, mesh, zero, microbatches, remat, model, **more):
    sizes, layers = MESHES[mesh]
    function, chunks = SCHEDULES[schedule]
    pipe = sizes["pipe"]
    m = {"P": pipe, "2P+1": 2 * pipe + 1}.get(microbatches) or int(microbatches)
    layout = jp.Layout(
        **sizes,
        zero=zero,
        microbatches=m,
        remat=remat,
        schedule=function,
        chunks=chunks,
        precision="fp32",
        **more,
    )
    name = with_layers(model, layers or max(4, pipe * chunks))
    ways = sizes.get("data", 1) * sizes.get("replica", 1)
    rows = m * ways * max(1, -(-8 // (m * ways)))
    assert_equal_runs(name, run_layout(name, layout, rows), reference(name, rows))


COVERING = [
    ("1f1b", "pipe2_data2_tensor2", 3, "2P+1", "none", "llama_tied"),
    ("gpipe", "pipe4_5_layers", 1, "3", "block", "llama"),
    ("interleaved", "pipe2_replica2_tensor2", 2, "3", "stage", "llama"),
    ("custom", "pipe4", 0, "P", "none", "llama_tied"),
    ("1f1b", "pipe8", 1, "1", "stage", "llama"),
]
PAIRS = every_pair(AXES)
SEED = random.SystemRandom().randrange(10_000)
SAMPLE = random.Random(SEED).sample([c for c in itertools.product(*AXES) if fits(c)], 12)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_three_steps_equal_one_device(case):
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_every_pair_of_settings_equals_one_device(case):
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("place", range(len(SAMPLE)))
def test_random_settings_equal_one_device(place):
    print(f"seed {SEED}: {SAMPLE[place]}")
    check(*SAMPLE[place])


@pytest.mark.parametrize("idle", ["skip", "compute"])
def test_bubbles_filled_with_nan_change_nothing(idle, monkeypatch):
    monkeypatch.setattr(branch, "EMPTY", np.nan)
    check("1f1b", "pipe4_5_layers", 2, "2", "none", "llama", idle=idle)


def test_vocabulary_that_does_not_divide_over_pipe_and_tensor_equals_one_device():
    layout = jp.Layout(pipe=2, data=2, tensor=2, zero=3, microbatches=4, precision="fp32")
    got = run_layout("gpt2", layout, packed=True)
    assert_equal_runs("gpt2", got, reference("gpt2", packed=True))


def test_evaluation_equals_one_device_on_interleaved_stages():
    name = with_layers("llama_tied", 5)
    layout = jp.Layout(
        pipe=2, data=2, tensor=2, schedule="interleaved", chunks=2, microbatches=2, precision="fp32"
    )
    plan = jp.make_plan(layout, state_init(name))
    module, config = MODELS[name]
    model, _ = jax.device_put(plan.stored(initial_state(name)), plan.shardings)
    loss_sum, count = jax.jit(plan.loss(module.loss))(model, ragged_batch(config.vocab_size))
    assert float(count) == 4 * 52
    np.testing.assert_allclose(loss_sum / count, reference(name)["loss"][0], rtol=1e-5)


def test_layers_keep_their_place_through_storage_order():
    name = with_layers("llama", 5)
    layout = jp.Layout(pipe=2, schedule="interleaved", chunks=2, precision="fp32")
    plan = jp.make_plan(layout, state_init(name), devices=jax.devices()[:2])
    marked = jax.tree.map(lambda a: a.copy(), initial_state(name))
    for leaf in jax.tree.leaves(marked[0].layers):
        leaf[:] = np.arange(5, dtype=np.float32).reshape(-1, *(1,) * (leaf.ndim - 1))
    stored = plan.stored(marked)
    scale = np.asarray(stored[0].layers.mlp_norm.scale[...])
    assert scale[:, 0].tolist() == [0, 1, 3, 0, 2, 0, 4, 0]  # stage 0: parts 0, 2; stage 1: 1, 3
    for a, b in zip(jax.tree.leaves(plan.canonical(stored)), jax.tree.leaves(marked), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("layers", "settings", "sentence"),
    [
        (3, dict(pipe=4), "num_layers=3 on pipe=4 x chunks=1 = 4 parts"),
        (5, dict(pipe=4, schedule="interleaved", chunks=2), "num_layers=5 on pipe=4 x chunks=2"),
        (8, dict(pipe=4, chunks=2), "chunks"),
        (8, dict(pipe=4, schedule="1f1"), "did you mean"),
        (8, dict(pipe=4, layers_per_stage=(2, 2, 2, 1)), "sum to 7"),
    ],
)
def test_combinations_that_cannot_work_are_refused_before_compiling(layers, settings, sentence):
    name = with_layers("llama", layers)
    with pytest.raises(ValueError, match=sentence):
        jp.make_plan(jp.Layout(**settings), state_init(name), devices=jax.devices()[:4])


def test_a_batch_that_microbatches_do_not_divide_names_the_nearest_that_work():
    layout = jp.Layout(pipe=2, data=2, microbatches=3)
    plan = jp.make_plan(layout, state_init("llama"), devices=jax.devices()[:4])
    batch = ragged_batch(64, rows=8)
    with pytest.raises(ValueError, match="microbatches=3 does not divide.*use microbatches=2"):
        jax.eval_shape(plan.value_and_grad(MODELS["llama"][0].loss), plan.state[0], batch)


@pytest.mark.parametrize("idle", ["skip", "compute"])
def test_offloaded_inputs_change_no_number_on_stages(idle):
    check("1f1b", "pipe2_data2_tensor2", 1, "3", "offload", "llama", idle=idle)


def test_kv_heads_fewer_than_tensor_equal_one_device_on_stages():
    layout = jp.Layout(pipe=2, tensor=4, zero=1, microbatches=2, precision="fp32")
    got = run_layout("llama_kv2", layout, rows=8)
    assert_equal_runs("llama_kv2", got, reference("llama_kv2", rows=8))


def test_bf16_on_stages_equals_one_device_to_bf16_accuracy():
    layout = jp.Layout(pipe=2, data=2, tensor=2, zero=3, microbatches=4, precision="bf16")
    got, want = run_layout("llama", layout), reference("llama")
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=2e-2)
    pairs = zip(jax.tree.leaves(got["gradients"]), jax.tree.leaves(want["gradients"]), strict=True)
    for a, b in pairs:
        assert a.dtype == np.float32
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
