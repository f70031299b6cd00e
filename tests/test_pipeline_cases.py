"""Pipelines as people report them broken: layers lost, gradients rescaled, programs that abort."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.nn import local_sequence, sum_partial
from layouts import MODELS, initial_state, model_init, ragged_batch, reference_loss
from small import (
    LAYOUTS,
    ONE,
    Squares,
    assert_close,
    gradients,
    half,
    layout,
    mean_loss,
    numbered_batch,
    place,
    random_squares,
    row_loss,
    squares,
    train,
)

FULL = numbered_batch(24, valid=[16])


# NVIDIA/Megatron-LM#1304: 30 layers on 4 stages ran as 28; NVIDIA-NeMo/Speech#14288: interleaved
# on 6 stages wanted other microbatches; jax-ml/jax#39301: one element a stage
@pytest.mark.parametrize(
    "layers, settings",
    [
        (30, dict(pipe=4, microbatches=4)),
        (5, dict(pipe=4, microbatches=2, remat="stage")),
        (4, dict(pipe=4, microbatches=3)),
        pytest.param(30, dict(pipe=4, microbatches=4, schedule="interleaved", chunks=2),
                     marks=pytest.mark.full),
        (13, dict(pipe=6, microbatches=3, schedule="interleaved", chunks=2, remat="block")),
        (8, dict(pipe=8, microbatches=1)),
        (6, dict(pipe=2, microbatches=2, schedule="gpipe", layers_per_stage=(1, 5))),
    ],
    ids=str,
)  # fmt: skip
def test_each_layer_runs_once_forward_and_once_backward_for_each_microbatch(layers, settings):
    init = squares(layers, scale=ONE)  # a layer adds 1 to every token
    split = jp.Layout(**settings, precision="fp32")
    plan = jp.make_plan(split, init, devices=jax.devices()[: split.num_devices])
    assert plan.placement.counts.sum() == layers
    value, found = gradients(init, mean_loss, split, FULL)
    np.testing.assert_allclose(value, layers, rtol=1e-6)
    assert_close(found, init())


def test_thirty_layers_are_split_into_8_8_7_7():
    plan = jp.make_plan(jp.Layout(pipe=4), squares(30), devices=jax.devices()[:4])
    assert plan.placement.counts[:, 0].tolist() == [8, 8, 7, 7]


# pytorch/torchtitan#1733: the running gradient was divided again at every accumulation
@pytest.mark.parametrize("microbatches", [2, 8])
def test_accumulating_on_top_of_a_pipeline_is_more_microbatches(microbatches):
    split = layout("pipe2_interleaved", microbatches=microbatches)
    value, found = gradients(squares(4, start=ONE), row_loss, split, numbered_batch())
    np.testing.assert_allclose(value, 4.038462, rtol=1e-6)
    np.testing.assert_allclose(found.start[...], 210 / 52 * ONE, rtol=1e-6)


# NVIDIA-NeMo/Speech#14288, huggingface/nanotron#347: messages in the framework's inner terms
@pytest.mark.parametrize(
    "layers, settings, words",
    [
        (8, dict(pipe=4, chunks=2), ["chunks=2", "interleaved"]),
        (3, dict(pipe=4), ["num_layers=3", "pipe=4", "chunks=1"]),
        (8, dict(pipe=4, layers_per_stage=(4, 4)), ["layers_per_stage=[4, 4]", "pipe=4"]),
        (8, dict(pipe=4, schedule="1f2b"), ["1f2b", "1f1b"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_the_words_of_the_layout(layers, settings, words):
    with pytest.raises(ValueError) as error:
        jp.make_plan(jp.Layout(**settings), squares(layers), devices=jax.devices()[:4])
    for word in words:
        assert word in str(error.value)


# Megatron-Bridge#6025: evaluation hung, on the last stage alone
@pytest.mark.parametrize("name", ["pipe2_data2_tensor2", "pipe4_gpipe"])
def test_evaluation_on_stages_sums_every_counted_token_once(name):
    split = layout(name, microbatches=2)
    init = squares(5, start=ONE)
    plan = jp.make_plan(split, init, devices=jax.devices()[: split.num_devices])
    loss_sum, count = jax.jit(plan.loss(row_loss))(place(plan, init()), numbered_batch())
    assert (float(loss_sum), float(count)) == (210, 52)


# google/paxml#4: aborted for microbatches > 1; learned positions, packed rows
@pytest.mark.parametrize(
    "microbatches", [4, *(pytest.param(m, marks=pytest.mark.full) for m in (1, 2, 8))]
)
def test_learned_positions_and_packed_rows_on_four_stages_equal_one_device(microbatches):
    split = jp.Layout(pipe=4, tensor=2, microbatches=microbatches, precision="fp32")
    plan = jp.make_plan(split, model_init("gpt2"))
    model, batch = initial_state("gpt2")[0], ragged_batch(61, 8, packed=True)
    value, found = jax.jit(plan.value_and_grad(MODELS["gpt2"][0].loss))(place(plan, model), batch)
    want_value, want = jax.jit(jax.value_and_grad(reference_loss))(model, batch)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    found, want = jax.device_get((plan.canonical(found), want))
    # a key bias moves all scores of a query alike: its gradient is rounding
    norm = optax.tree.norm(want)
    for tree in (found, want):
        noise = tree.layers.attention.key.bias
        assert np.abs(noise[...]).max() <= 1e-5 * norm
        noise.set_value(np.ones_like(noise[...]))
    assert_close(found, want)


# ---- control flow of one's own inside the region


@jax.custom_vjp
def same(x):
    return x


same.defvjp(lambda x: (x, None), lambda _, g: (g,))


class Everything(Squares):
    """`Squares` with a scan, a branch, recomputation, an own derivative and an axis index."""

    def block(self, layer, x, batch):
        @jax.checkpoint
        def body(x, _):
            return same(x + half(layer.scale) / 2), None

        part = jnp.zeros((*batch["tokens"].shape, 1)) + half(layer.up)
        x = lax.scan(body, x, None, length=2)[0] + sum_partial(part, batch)
        x = lax.cond(batch["layer"] >= 0, lambda x: x, lambda x: 2 * x, x)
        return x + 0 * jp.nn.parallel.axis_index(("pipe", "data"))


def everything(key=None):
    model = random_squares(8)()
    return Everything(*(p[...] for p in (model.start, model.layers.scale, model.layers.up,
                                         model.one, model.pair)))  # fmt: skip


def run_everything(names):
    for name in names:
        split = layout(name, microbatches=1 if name == "data8" else 2)
        _, found = gradients(everything, mean_loss, split, numbered_batch())
        assert_close(found, everything(), tolerance=2e-6)
        print(name, flush=True)


RUN = """
import sys
sys.path.insert(0, {tests!r})
import conftest
from test_pipeline_cases import run_everything
run_everything({names!r})
"""


def check_everything(names):
    code = RUN.format(tests=str(Path(__file__).parent), names=names)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == names, run.stderr[-3000:]
    assert run.returncode == 0


# jax-ml/jax#29162, openxla/xla#4340: the process aborted; so this runs in one of its own
def test_control_flow_inside_layers_runs_on_every_kind_of_layout():
    check_everything(["one", "tensor4", "pipe2_data2_tensor2", "pipe2_data4_zero3"])


@pytest.mark.full
def test_control_flow_inside_layers_runs_on_every_layout():
    check_everything(list(LAYOUTS))


# alpa-projects/alpa#839: an optimizer with a branch inside a parallel program failed
BAD = 7


def spoiled_loss(model, x, batch):
    tokens = local_sequence(batch["tokens"], batch)[..., None]
    return row_loss(model, x * jnp.where(tokens == BAD, jnp.nan, 1.0), batch)


def branching():
    rate = optax.join_schedules([optax.linear_schedule(0, 1e-2, 2), optax.cosine_decay_schedule(
        1e-2, 8)], [2])  # fmt: skip
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return optax.apply_if_finite(optax.MultiSteps(tx, 2).gradient_transformation(), 3)


@pytest.mark.parametrize("name", ["data4_zero2", "pipe2_data4_zero3"])
def test_optimizers_that_branch_equal_one_device(name):
    batches = [numbered_batch(8, valid=[16, 1, 5, i]) for i in range(6)]
    batches[3]["tokens"][7, 0] = BAD  # in the last row alone: this step is left out
    got, metrics = train(random_squares(), spoiled_loss, layout(name), branching(), batches)
    want, _ = train(random_squares(), spoiled_loss, layout("one"), branching(), batches)
    assert [m["nonfinite"] for m in metrics] == [False] * 3 + [True] + [False] * 2
    assert int(want[1].total_notfinite) == 1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    moved = np.abs(want[0].start[...] - random_squares()().start[...])
    assert moved.max() > 1e-3


def test_a_branch_that_differs_along_an_axis_with_a_collective_inside_is_refused_when_traced():
    class Differing(Squares):
        def block(self, layer, x, batch):
            return lax.cond(jnp.sum(x) > 0, lambda x: lax.psum(x, "tensor"), lambda x: x, x)

    def init(key=None):
        return Differing(*[np.zeros(s, np.float32) for s in ((4,), (2, 4), (2, 4), (1,), (2, 1))])

    with pytest.raises(TypeError, match="branches must have equal output types"):
        gradients(init, mean_loss, layout("tensor4"), numbered_batch())
