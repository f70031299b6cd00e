"""Products, lookups and norms: what their backward passes keep and how they add up."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.nn.embedding import look_up
from jaxpar.nn.linear import product
from jaxpar.nn.norms import RMSNorm


def kept(function, *args) -> list:
    """Shapes of what the vjp of a function keeps besides its arguments."""
    found = {}

    def trace(*args):
        leaves = jax.tree.leaves(jax.vjp(function, *args)[1])
        found["more"] = [a.shape for a in leaves if not any(a is b for b in args) and a.ndim]
        return leaves

    jax.eval_shape(trace, *args)
    return found["more"]


def test_a_bf16_tables_gradient_counts_every_one_of_many_equal_tokens():
    table, rows = jnp.zeros((4, 2), jnp.bfloat16), jnp.zeros((1, 4096), jnp.int32)
    _, back = jax.vjp(lambda t: look_up(t, rows), table)
    (gradient,) = back(jnp.ones((1, 4096, 2), jnp.bfloat16))
    np.testing.assert_array_equal(gradient[0], [4096, 4096])  # a bf16 sum of ones ends at 256
    np.testing.assert_array_equal(gradient[1:], 0)


def test_a_row_below_0_reads_0_and_gets_no_gradient():
    table, rows = jnp.ones((4, 2)), jnp.array([[-1, 2]])
    x, back = jax.vjp(lambda t: look_up(t, rows), table)
    np.testing.assert_array_equal(x, [[[0, 0], [1, 1]]])
    np.testing.assert_array_equal(back(jnp.ones_like(x))[0][:, 0], [0, 0, 1, 0])


def test_products_equal_einsum_forward_and_backward():
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (2, 5, 3, 4)), jax.random.normal(keys[1], (3, 4, 6, 2))
    y, back = jax.vjp(lambda x, w: product(x, w, 2), x, w)
    want, want_back = jax.vjp(lambda x, w: jnp.einsum("btij,ijkl->btkl", x, w), x, w)
    dy = jax.random.normal(keys[2], y.shape)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    for got, right in zip(back(dy), want_back(dy), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


def test_three_products_of_one_input_keep_it_once():
    x, w = jnp.ones((2, 5, 4)), jnp.ones((4, 6))
    assert kept(lambda x, w: [product(x, w, 1), product(x, 2 * w, 1)], x, w) == [(4, 6)]


def test_norms_keep_their_input_and_nothing_of_its_size():
    norm, x = RMSNorm(8), jnp.ones((2, 5, 8), jnp.bfloat16)
    assert (2, 5, 8) not in kept(norm, x)


def test_gradients_have_their_primals_type_and_sum_over_devices_that_share_it():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    x, w = jnp.ones((8, 5, 4)), jnp.ones((4, 6), jnp.bfloat16)
    tokens = jnp.zeros((8, 5), jnp.int32)

    def gradients(w, table, x, tokens):
        loss = lambda w, t: (product(x, w, 1).sum() + look_up(t, tokens).sum()).astype(jnp.float32)  # noqa: E731, E501
        return jax.grad(loss, (0, 1))(w, table)

    inside = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(spec(), spec(), spec("data"), spec("data")),
        out_specs=spec(),
    )
    dw, d_table = jax.jit(inside)(w, jnp.ones((3, 2)), x, tokens)
    assert dw.dtype == jnp.bfloat16 and d_table.dtype == jnp.float32
    np.testing.assert_array_equal(dw, 8 * 5)
    np.testing.assert_array_equal(d_table, [[40, 40], [0, 0], [0, 0]])
