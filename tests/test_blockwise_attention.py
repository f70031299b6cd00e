"""Attention in blocks: the numbers of `jax.nn.dot_product_attention`, and no matrix of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.nn.attention import choose_kernel, dense_attention, document_mask
from jaxpar.nn.blockwise_attention import blockwise_attention
from jaxpar.nn.parallel import Settings
from layouts import MODELS, ragged_batch

CASES = {
    "one block": dict(length=8, block=8),
    "blocks that divide": dict(length=12, block=4),
    "blocks that do not divide": dict(length=13, block=4),
    "a block longer than the row": dict(length=5, block=16),
    "one head to a key head": dict(length=12, block=4, key_heads=4),
    "one key head": dict(length=12, block=4, key_heads=1),
}


def inputs(length, block, key_heads=2, dtype=jnp.float32, batch=2, heads=4, head_dim=8):
    keys = jax.random.split(jax.random.key(0), 4)
    q, out = (jax.random.normal(k, (batch, length, heads, head_dim), dtype) for k in keys[:2])
    k, v = (jax.random.normal(k, (batch, length, key_heads, head_dim), dtype) for k in keys[2:])
    return q, k, v, out


def value_and_gradients(attention, q, k, v, weight):
    """out, dq, dk, dv of sum(out * weight), in one jit."""

    def loss(q, k, v):
        out = attention(q, k, v)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


def compare(q, k, v, weight, block, mask=None, is_causal=True, **tolerance):
    found = value_and_gradients(
        lambda *a: blockwise_attention(*a, mask, is_causal=is_causal, block=block), q, k, v, weight
    )
    expected = value_and_gradients(
        lambda *a: jax.nn.dot_product_attention(*a, mask=mask, is_causal=is_causal),
        q, k, v, weight,
    )  # fmt: skip
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), **tolerance)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_jax(name, is_causal):
    arrays = inputs(**CASES[name])
    compare(*arrays, CASES[name]["block"], is_causal=is_causal, rtol=1e-5, atol=2e-6)


def test_documents_in_a_row_do_not_see_each_other():
    segments = jnp.array([[0] * 5 + [1] * 6 + [2] * 2, [0] * 1 + [1] * 12])
    mask = document_mask({"segment_ids": segments})
    compare(*inputs(13, 4), 4, mask=mask, rtol=1e-5, atol=2e-6)


def test_a_mask_may_differ_between_heads():
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, (1, 4, 13, 13)) | jnp.eye(13, dtype=bool)
    compare(*inputs(13, 4), 4, mask=mask, is_causal=False, rtol=1e-5, atol=2e-6)


def test_a_query_that_sees_no_key_gets_zeros_and_gives_none():
    q, k, v, weight = inputs(13, 4)
    mask = jnp.ones((1, 1, 13, 13), bool).at[:, :, 3].set(False)
    attention = lambda *a: blockwise_attention(*a, mask, block=4)  # noqa: E731
    out, dq, dk, dv = value_and_gradients(attention, q, k, v, weight)
    assert (out[:, 3] == 0).all() and (dq[:, 3] == 0).all()
    without = value_and_gradients(attention, q, k, v, weight.at[:, 3].set(0))
    for a, b in zip((dq, dk, dv), without[1:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_with_bf16_scores_and_sums_stay_fp32():
    q, k, v, weight = inputs(64, 16, dtype=jnp.bfloat16)
    compare(q, k, v, weight, 16, rtol=2e-2, atol=2e-2)
    exact = value_and_gradients(
        lambda *a: jax.nn.dot_product_attention(*a, is_causal=True),
        *(a.astype(jnp.float32) for a in (q, k, v)), weight,
    )  # fmt: skip
    out = blockwise_attention(q, k, v, is_causal=True, block=16)
    assert np.abs(np.float32(out) - exact[0]).max() < 0.02


def test_inside_shard_map_heads_may_be_split_and_keys_shared():
    mesh = jp.make_mesh(jp.Layout(data=2, tensor=4))
    q, k, v, weight = inputs(8, 4, key_heads=1)
    spread = P("data", None, "tensor")

    def local(q, k, v, weight):
        def loss(q, k, v):
            return jnp.sum(blockwise_attention(q, k, v, is_causal=True, block=4) * weight)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    found = jax.jit(jax.shard_map(
        local, mesh=mesh, in_specs=(spread, P("data"), P("data"), spread),
        out_specs=(spread, P("data"), P("data")),
    ))(q, k, v, weight)  # fmt: skip
    expected = value_and_gradients(
        lambda *a: jax.nn.dot_product_attention(*a, is_causal=True), q, k, v, weight
    )
    for a, b in zip(found, expected[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def test_no_array_of_the_program_has_the_size_of_the_scores():
    shape = jax.ShapeDtypeStruct((1, 2048, 2, 8), jnp.float32)

    def temporaries(attention):
        grads = jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v)), (0, 1, 2))
        compiled = jax.jit(grads).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 2 * 2048 * 2048 * 4
    assert temporaries(lambda *a: jax.nn.dot_product_attention(*a, is_causal=True)) >= scores
    assert temporaries(lambda *a: blockwise_attention(*a, is_causal=True)) < scores / 8


def test_a_plan_takes_the_kernel_and_gives_the_same_gradients_of_packed_documents():
    module, config = MODELS["llama"]
    layout = jp.Layout(data=4, tensor=2, precision="fp32")
    batch = ragged_batch(config.vocab_size, rows=8, packed=True)
    found = []
    for kernel in ("xla", "blockwise"):
        plan = jp.make_plan(
            layout, lambda key: module.Model(config, rngs=nnx.Rngs(key)), attention_kernel=kernel
        )
        model = plan.init(jax.random.key(0))
        found.append(jax.jit(plan.value_and_grad(module.loss))(model, batch))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="attention_kernel='flash' is not a choice; known: xla"):
        choose_kernel("flash", "cpu", "bf16")


def test_the_settings_choose_the_kernel():
    q, k, v, _ = inputs(512, 256)
    blocks = {"settings": Settings(attention_kernel="blockwise")}
    assert "512,512" not in str(jax.make_jaxpr(dense_attention)(q, k, v, blocks))
    assert "512,512" in str(jax.make_jaxpr(dense_attention)(q, k, v, {}))
