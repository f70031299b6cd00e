"""Library kernels in the ring, and attention where it cannot run: what a CPU test would not see.

The kernel "xla" goes the same way as cuDNN's: in blocks and halves, merged by their log-sum-exp.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.nn import dense_attention, flash, self_attention
from jaxpar.nn.order import Context, document_places
from jaxpar.nn.parallel import Settings
from layouts import MODELS, initial_state, model_init, ragged_batch, reference_loss

BOTH = dict(attention="ring+ulysses", ulysses=2)


def arrays(length, heads=4, kv_heads=2, dtype=jnp.float32, scale=1.0):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, length, n, 8) for n in (heads, kv_heads, kv_heads)]
    return [scale * jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("settings", [
    dict(context=2), dict(context=2, attention="allgather"), dict(context=4, **BOTH),
], ids=str)  # fmt: skip
def test_documents_that_do_not_divide_are_right_with_a_librarys_kernel(settings):
    """Of 7, 7 and 2 tokens: what one device has too much goes to the next, out of order."""
    segments = np.repeat(np.int32([0, 1, 2]), [7, 7, 2])[None].repeat(8, axis=0)
    order = document_places(jnp.asarray(segments), Context(ring=2))[0].reshape(2, 8)
    assert (np.diff(order) < 0).any()
    batch = ragged_batch(64, 8) | dict(segment_ids=segments)
    layout = jp.Layout(**settings, context_order="document", precision="fp32")
    plan = jp.make_plan(layout, model_init("llama"), devices=jax.devices()[: layout.num_devices],
                        attention_kernel="xla")  # fmt: skip
    model = initial_state("llama")[0]
    stored = jax.device_put(plan.stored(model), plan.shardings)
    value, found = jax.jit(plan.value_and_grad(MODELS["llama"][0].loss))(stored, batch)
    want_value, want = jax.jit(jax.value_and_grad(reference_loss))(model, batch)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.abs(np.asarray(a) - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize("kernel", ["blockwise", "xla"])
def test_positions_alone_say_what_comes_first(kernel):
    q, k, v = arrays(8)
    positions = jnp.broadcast_to(jnp.arange(8)[::-1], (2, 8))
    found = jp.attention(q, k, v, positions=positions, kernel=kernel)
    want = jp.attention(*(a[:, ::-1] for a in (q, k, v)), kernel=kernel)[:, ::-1]
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="order='zigzag' and positions .*give one"):
        jp.attention(q, k, v, positions=positions, order="zigzag", kernel=kernel)


def test_the_log_sum_exp_of_a_block_is_not_rounded_to_the_type_of_its_inputs():
    q, k, v = arrays(64, dtype=jnp.bfloat16, scale=4.0)
    _, lse = flash.forward(q, k, v, None, True, "xla")
    scores = np.einsum("btkgh,bskh->bkgts", np.float32(q).reshape(2, 64, 2, 2, 8), np.float32(k))
    scores = np.where(np.tri(64, dtype=bool), scores * 8**-0.5, -np.inf).reshape(2, 4, 64, 64)
    want = jax.nn.logsumexp(scores, axis=-1)
    assert want.max() > 20 and lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, want, atol=1e-4)


def test_dense_attention_on_a_split_row_is_refused():
    batch = dict(settings=Settings(context=Context(ring=2)))
    with pytest.raises(ValueError, match="context=2 splits it; use jaxpar.nn.self_attention"):
        dense_attention(*arrays(8), batch)
    np.testing.assert_array_equal(self_attention(*arrays(8), {}), dense_attention(*arrays(8), {}))


def test_an_axis_that_is_not_there_is_refused_and_the_default_is_one_device():
    mesh = jp.make_mesh(jp.Layout(context=2), jax.devices()[:2])

    def run(**options):
        inside = lambda *a: jp.attention(*a, **options)  # noqa: E731
        return jax.shard_map(inside, mesh=mesh, in_specs=P(None, "context"),
                             out_specs=P(None, "context"))(*arrays(8))  # fmt: skip

    whole = jp.attention(*arrays(8))
    np.testing.assert_allclose(run(), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(axis="context"), whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no manual axis 'seq' here"):
        run(axis="seq")


@pytest.mark.parametrize("variant", ["ring", "ulysses", "allgather", "ring+ulysses"])
def test_every_variant_runs_on_one_device(variant):
    ulysses = 2 if variant == "ring+ulysses" else None
    found = jp.attention(*arrays(8), variant=variant, ulysses=ulysses)
    np.testing.assert_allclose(found, jp.attention(*arrays(8)), rtol=1e-5, atol=1e-6)
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    found = jp.attention(*arrays(8), variant=variant, ulysses=ulysses, mesh=mesh)
    np.testing.assert_allclose(found, jp.attention(*arrays(8)), rtol=1e-5, atol=1e-6)


def test_arrays_of_unlike_types_and_cudnn_for_fp32_are_refused():
    q, k, v = arrays(8)
    with pytest.raises(ValueError, match="q is float32, k float32 and v bfloat16; .*one type"):
        jp.attention(q, k, v.astype(jnp.bfloat16))
    with pytest.raises(
        ValueError, match="kernel='cudnn' takes 16-bit types, found float32|bfloat16 or"
    ):
        jp.attention(q, k, v, kernel="cudnn")


def test_blocks_that_cudnn_does_not_take_are_refused_with_the_nearest():
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    segments = jnp.zeros((2, 12), jnp.int32)
    with pytest.raises(
        ValueError, match="gives blocks of 3; use a sequence that is a multiple of 8"
    ):
        jp.attention(
            *arrays(12, dtype=jnp.bfloat16), segment_ids=segments, kernel="cudnn", mesh=mesh
        )


@pytest.mark.parametrize("returned, words", [
    (lambda model, x, batch: model.loss(x, batch), "returned tuple"),
    (lambda model, x, batch: model.logits(x, batch), "dims batch, seq, .*returned shape"),
    (lambda model, x, batch: x[..., 0], "jaxpar.nn.gather_sequence"),
])  # fmt: skip
def test_outputs_that_are_not_one_number_a_token_are_refused_in_a_sentence(returned, words):
    layout = jp.Layout(context=2, tensor=2, precision="fp32")
    plan = jp.make_plan(layout, model_init("llama"), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(plan.outputs(returned), initial_state("llama")[0], ragged_batch(64, 8))
