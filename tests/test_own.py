"""The pipeline for functions and pytrees of one's own equals jax.value_and_grad."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxpar as jp
from layouts import VALID

VOCAB, WIDTH = 32, 16


def embed(params, batch):
    return params["table"][batch["tokens"]]


def block(layer, x, batch):
    return x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]


def head_loss(params, x, batch):
    logits = x @ params["table"].T * params["scale"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[
        ..., 0
    ]
    return -jnp.sum(picked * batch["weights"]), jnp.sum(batch["weights"])


def parameters(num_layers):
    rng = np.random.default_rng(0)
    draw = lambda *shape: (0.3 * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    layers = {"up": draw(num_layers, WIDTH, 24), "bias": draw(num_layers, 24),
              "down": draw(num_layers, 24, WIDTH)}  # fmt: skip
    return {"table": draw(VOCAB, WIDTH), "layers": layers, "scale": draw(1)}


def make_batch(rows):
    rng = np.random.default_rng(1)
    valid = np.resize(VALID, rows)[:, None]
    return {
        "tokens": rng.integers(0, VOCAB, (rows, 16), dtype=np.int32),
        "targets": rng.integers(0, VOCAB, (rows, 16), dtype=np.int32),
        "weights": (np.arange(16) < valid).astype(np.float32),
    }


@functools.cache
def expected(num_layers, rows):
    def whole(params, batch):
        x = embed(params, batch)
        for i in range(num_layers):
            x = block(jax.tree.map(lambda a, i=i: a[i], params["layers"]), x, batch)
        loss_sum, count = head_loss(params, x, batch)
        return loss_sum / count

    return jax.jit(jax.value_and_grad(whole))(parameters(num_layers), make_batch(rows))


def mesh(**sizes):
    count = int(np.prod(list(sizes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))


@pytest.mark.parametrize(
    ("sizes", "num_layers", "rows", "settings"),
    [
        (dict(pipe=4, data=2), 6, 32, dict(microbatches=4)),  # uneven; head by rows
        (dict(pipe=4), 4, 6, dict(microbatches=2)),  # 3 rows: the head on the last stage
        (dict(pipe=2, data=2), 8, 24, dict(microbatches=3, schedule="interleaved", chunks=2)),
        (dict(data=2, pipe=2), 5, 16, dict(microbatches=2, schedule="gpipe", remat="stage")),
        (dict(data=4), 3, 16, dict(microbatches=2, remat="block")),
    ],
)
def test_loss_and_every_gradient_equal_jax(sizes, num_layers, rows, settings):
    grad_fn = jp.pipeline.value_and_grad(embed, block, head_loss, mesh=mesh(**sizes), **settings)
    loss, gradients = jax.jit(grad_fn)(parameters(num_layers), make_batch(rows))
    want_loss, want = expected(num_layers, rows)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert jax.tree.structure(gradients) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_a_mesh_with_explicit_axes_works():
    own = jax.make_mesh((2, 2), ("pipe", "data"), devices=jax.devices()[:4])
    grad_fn = jp.pipeline.value_and_grad(embed, block, head_loss, mesh=own, microbatches=2)
    loss, _ = jax.jit(grad_fn)(parameters(4), make_batch(16))
    np.testing.assert_allclose(loss, expected(4, 16)[0], rtol=1e-5)


def test_a_plain_sum_is_not_divided():
    plain = lambda params, x, batch: (head_loss(params, x, batch)[0], None)  # noqa: E731
    grad_fn = jp.pipeline.value_and_grad(embed, block, plain, mesh=mesh(pipe=2), microbatches=2)
    batch = make_batch(8)
    loss, _ = jax.jit(grad_fn)(parameters(4), batch)
    np.testing.assert_allclose(loss, expected(4, 8)[0] * batch["weights"].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(mesh=dict(pipe=2, tensor=2)), "tensor=2"),
        (dict(params={"table": np.ones((2, 2), np.float32)}), "no entry `layers`"),
        (dict(settings=dict(microbatches=3)), "microbatches=3 does not divide"),
        (dict(settings=dict(schedule="1f2b")), "1f1b"),
        (dict(loss=lambda p, x, b: jnp.sum(x)), r"must return \(sum, count\)"),
    ],
)
def test_what_cannot_work_is_one_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        grad_fn = jp.pipeline.value_and_grad(
            embed, block, change.get("loss", head_loss),
            mesh=mesh(**change.get("mesh", dict(pipe=2))), **change.get("settings", {}),
        )  # fmt: skip
        jax.eval_shape(grad_fn, change.get("params", parameters(4)), make_batch(8))
