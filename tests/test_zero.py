"""Shardings for one's own arrays: where they live, what that saves, and that nothing changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.zero import shard, whole_leaves, zero_shardings

MESH = jp.make_mesh(jp.Layout(data=4, tensor=2))
WHOLE = NamedSharding(MESH, P())
ROWS = NamedSharding(MESH, P("data"))


def dict_model(key):
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (12, 32)) / 4, "bias": jnp.zeros(32),
            "down": jax.random.normal(b, (32, 3)) / 4, "scale": jnp.ones(())}  # fmt: skip


def dict_apply(params, x):
    return params["scale"] * jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.gelu(linen.Dense(32)(x)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """What equinox makes of a module: a dataclass that is a pytree, with its own call."""

    up: jax.Array
    down: jax.Array
    slope: float = dataclasses.field(default=0.1, metadata=dict(static=True))

    def __call__(self, x):
        return jax.nn.leaky_relu(x @ self.up, self.slope) @ self.down


def dataclass_model(key):
    params = dict_model(key)
    return Module(params["up"], params["down"])


MODELS = {
    "dict": (dict_model, dict_apply),
    "linen": (lambda key: Linen().init(key, jnp.zeros((1, 12))), Linen().apply),
    "dataclass": (dataclass_model, lambda model, x: model(x)),
}
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def make_step(apply, out_shardings=None):
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((apply(p, x) - y) ** 2))(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out_shardings)


def bytes_per_device(tree) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_an_own_loop_with_split_state_equals_the_run_on_one_device(name, zero):
    init, apply = MODELS[name]
    rng = np.random.default_rng(0)
    data = [(np.float32(rng.normal(size=(16, 12))), np.float32(rng.normal(size=(16, 3))))
            for _ in range(3)]  # fmt: skip
    params = init(jax.random.key(0))
    opt_state, step = TX.init(params), make_step(apply)
    for x, y in data:
        params, opt_state, loss = step(params, opt_state, x, y)
    want = jax.device_get((params, opt_state, loss))

    params = init(jax.random.key(0))
    split = zero_shardings(jax.eval_shape(TX.init, params), MESH)
    placed = zero_shardings(params, MESH) if zero == 3 else jax.tree.map(lambda _: WHOLE, params)
    params = shard(params, placed)
    opt_state = jax.jit(TX.init, out_shardings=split)(params)
    step = make_step(apply, (placed, split, None))
    for x, y in data:
        params, opt_state, loss = step(params, opt_state, *shard((x, y), ROWS))
    for a, b in zip(jax.tree.leaves((params, opt_state, loss)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert step._cache_size() == 1
    for leaf, sharding in zip(jax.tree.leaves(opt_state), jax.tree.leaves(split), strict=True):
        assert leaf.sharding == sharding


def test_the_optimizer_state_takes_a_quarter_of_the_bytes_on_four_devices():
    params = shard(dict_model(jax.random.key(0)), WHOLE)
    split = zero_shardings(jax.eval_shape(TX.init, params), MESH)
    opt_state = jax.jit(TX.init, out_shardings=split)(params)
    moments = 2 * 4 * (12 * 32 + 32 + 32 * 3)  # mu and nu, fp32
    assert bytes_per_device(opt_state) == moments // 4 + 2 * 4 + 4  # two scales, one count
    step = make_step(dict_apply, (jax.tree.map(lambda _: WHOLE, params), split, None))
    x, y = shard((np.zeros((16, 12), np.float32), np.zeros((16, 3), np.float32)), ROWS)
    memory = step.lower(params, opt_state, x, y).compile().memory_analysis()
    model = 4 * (12 * 32 + 32 + 32 * 3 + 1)
    rows = 4 * (16 * 12 + 16 * 3) // 4
    assert memory.argument_size_in_bytes == model + bytes_per_device(opt_state) + rows


def test_each_leaf_is_split_on_its_largest_dim_that_divides():
    tree = {"a": np.zeros((8, 12)), "b": np.zeros((16, 7)), "c": np.zeros((3, 5)),
            "d": np.zeros(4), "e": np.zeros(()), "f": 1.0, "g": np.zeros((0, 4))}  # fmt: skip
    found = zero_shardings(tree, MESH)
    specs = {name: sharding.spec for name, sharding in found.items()}
    assert specs == {"a": P(None, "data"), "b": P("data", None), "c": P(None, None),
                     "d": P("data"), "e": P(), "f": P(), "g": P(None, "data")}  # fmt: skip
    assert whole_leaves(tree, found) == ["c", "e", "f"]


def test_specs_come_first_and_zero_splits_what_they_leave():
    tree = {"up": np.zeros((6, 64)), "down": np.zeros((64, 12)), "both": np.zeros((3, 16))}
    up, down = jp.dims.spec(("embed", "ffn"), MESH), jp.dims.spec(("ffn", "embed"), MESH)
    specs = {"up": up, "down": down, "both": P(None, "tensor")}
    found = jax.tree.map(lambda s: s.spec, zero_shardings(tree, MESH, specs=specs))
    assert found == {"up": P(None, ("tensor", "data")), "down": P("tensor", "data"),
                     "both": P(None, ("tensor", "data"))}  # fmt: skip


def test_a_leaf_that_its_spec_splits_over_the_axis_already_stays_as_it_is():
    found = zero_shardings({"w": np.zeros((8, 8))}, MESH, specs=P("data"))
    assert found["w"].spec == P("data", None)


def test_specs_may_be_a_prefix_of_the_tree():
    tree = {"layers": {"w": np.zeros((4, 8)), "v": np.zeros((2, 8))}, "head": np.zeros((4, 4))}
    found = zero_shardings(tree, MESH, specs={"layers": P(None, "tensor"), "head": None})
    specs = jax.tree.map(lambda s: s.spec, found)
    assert specs["layers"] == {"w": P("data", "tensor"), "v": P(None, ("tensor", "data"))}
    assert specs["head"] in (P("data", None), P(None, "data"))


def test_optimizer_state_takes_the_specs_of_its_parameters_with_optax_map_params():
    params = {"up": jnp.zeros((12, 32)), "down": jnp.zeros((32, 12))}
    specs = {"up": P(None, "tensor"), "down": P("tensor", None)}
    state = jax.eval_shape(TX.init, params)
    state_specs = optax.tree.map_params(TX, lambda _, spec: spec, state, specs,
                                        transform_non_params=lambda _: P())  # fmt: skip
    found = zero_shardings(state, MESH, specs=state_specs)
    assert found[1][0].mu["up"].spec == found[1][0].nu["up"].spec == P("data", "tensor")
    assert found[1][0].count.spec == P()


def test_axes_may_be_several():
    found = zero_shardings({"w": np.zeros((4, 24))}, MESH, axes=("data", "tensor"))
    assert found["w"].spec == P(None, ("data", "tensor"))


W = np.zeros((6, 8), np.float32)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: zero_shardings({"w": W}, MESH, axes=("dat",)), ["'dat'", "did you mean 'data'?"]),
        (lambda: zero_shardings({"w": W}, MESH, specs={"w": P("tensr")}), ["w", "'tensor'?"]),
        (lambda: zero_shardings({"w": W}, MESH, specs={"w": P("data")}),
         ["w (6, 8): dim 0 of size 6 does not split over data=4", "multiple of 4"]),
        (lambda: zero_shardings({"w": W}, MESH, specs=P(None, None, "data")), ["at most 2"]),
        (lambda: zero_shardings({"w": W}, MESH, specs={"v": P()}), ["nor is it a prefix"]),
        (lambda: zero_shardings({"act": jax.nn.relu}, MESH), ["act is a function, not an array"]),
        (lambda: shard({"a": {"w": W}}, NamedSharding(MESH, P(("data", "tensor")))),
         ["a.w (6, 8): dim 0 of size 6 does not split over data=4 x tensor=2 = 8"]),
        (lambda: shard({"w": W, "v": {"x": W}}, WHOLE),
         ["v.x and w are the very same array", "jnp.copy"]),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_an_error_that_names_the_leaf_and_the_numbers(call, words):
    with pytest.raises(ValueError) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_equal_numbers_in_two_leaves_are_not_the_same_array():
    placed = shard({"a": 1.0, "b": 1.0, "c": W, "d": W.copy()}, WHOLE)
    assert placed["a"].sharding == placed["d"].sharding == WHOLE
