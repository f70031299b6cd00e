"""A model whose results are worked out by hand, and that compiles in a second.

Every parameter p adds sum(p^2) / 2 to the activation of every token. So with the mean activation
as the loss, the gradient of every parameter is the parameter itself, under every layout.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar as jp
from jaxpar.loss import cross_entropy
from jaxpar.nn import Embedding, local_sequence, param, sum_partial
from layouts import VALID

ONE = np.float32([1, 1, 0, 0])
"""A parameter that adds 1."""

LAYOUTS = {
    "one": {},
    "data8": dict(data=8),
    "tensor4": dict(tensor=4),
    "tensor4_whole": dict(tensor=4, sequence_parallel=False),
    "pipe4": dict(pipe=4),
    "pipe4_gpipe": dict(pipe=4, schedule="gpipe"),
    "pipe2_interleaved": dict(pipe=2, schedule="interleaved", chunks=2),
    "pipe2_data2_tensor2": dict(pipe=2, data=2, tensor=2),
    "replica2_data2_tensor2": dict(replica=2, data=2, tensor=2),
    "data4_zero0": dict(data=4, zero=0),
    "data4_zero1": dict(data=4, zero=1),
    "data4_zero2": dict(data=4, zero=2),
    "data4_zero3": dict(data=4, zero=3),
    "pipe2_data4_zero3": dict(pipe=2, data=4, zero=3),
}


def layout(name: str, **more) -> jp.Layout:
    return jp.Layout(**{"precision": "fp32", **LAYOUTS[name], **more})


class Layer(nnx.Module):
    def __init__(self, scale, up):
        self.scale = param(jnp.asarray(scale), ("layers", "embed"))
        self.up = param(jnp.asarray(up), ("layers", "ffn"))


class Squares(nnx.Module):
    """`start` [4], `scale` [L, 4], `up` [L, F] split over tensor, and leaves of one and two."""

    def __init__(self, start, scale, up, one, pair):
        self.start = param(jnp.asarray(start), ("embed",))
        self.one = param(jnp.asarray(one), ("embed",))
        self.pair = param(jnp.asarray(pair), (None, "embed"))
        self.layers = Layer(scale, up)

    def embed(self, batch):
        tokens = local_sequence(batch["tokens"], batch)
        added = half(self.start) + half(self.one) + half(self.pair)
        return jnp.zeros((*tokens.shape, 1)) + added

    def block(self, layer, x, batch):
        # up[f_tensor]: a part of the sum on each device, added over tensor
        part = jnp.zeros((*batch["tokens"].shape, 1)) + half(layer.up)
        return x + half(layer.scale) + sum_partial(part, batch)


def half(p):
    return jnp.sum(p[...] ** 2) / 2


def squares(layers=4, start=(0, 0, 0, 0), scale=(0, 0, 0, 0), up=(0, 0, 0, 0), one=(0,),
            pair=((0,), (0,))):  # fmt: skip
    """An `init`: (key) -> Squares. `scale` and `up` are of every layer, or [L, ...]."""

    def init(key=None):
        arrays = [np.asarray(a, np.float32) for a in (start, scale, up, one, pair)]
        for i in (1, 2):
            arrays[i] = np.broadcast_to(arrays[i], (layers, arrays[i].shape[-1]))
        return Squares(*arrays)

    return init


def random_squares(layers=4, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape)  # noqa: E731
    return squares(layers, draw(4), draw(layers, 4), draw(layers, 8), draw(1), draw(2, 1))


class Tied(nnx.Module):
    """One table looks tokens up and is the output head; layers multiply by `scale` [L, E]."""

    def __init__(self, key, vocab_size=13, embed_dim=8, layers=4):
        self.embedding = Embedding(vocab_size, embed_dim, key=key, std=0.5)
        self.layers = Layer(1 + 0.1 * jnp.arange(layers * embed_dim).reshape(layers, -1) / layers,
                            jnp.zeros((layers, 8)))  # fmt: skip
        self.vocab_size = vocab_size

    def embed(self, batch):
        return self.embedding(batch["tokens"], batch)

    def block(self, layer, x, batch):
        return x * layer.scale[...] + sum_partial(
            jnp.zeros((*batch["tokens"].shape, 1)) + half(layer.up), batch
        )

    def loss(self, x, batch):
        return cross_entropy(x, self.embedding.table[...], batch, self.vocab_size)


def own_loss(model, x, batch):
    return model.loss(x, batch)


def tied_on_one_device(lookup, head, scale, batch):
    """The loss of `Tied`, with a table for each use, in plain JAX."""
    x = lookup[batch["tokens"]]
    for row in scale:
        x = x * row
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ head.T, batch["targets"])
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


def mean_loss(model, x, batch):
    """The mean of x over counted tokens."""
    weights = local_sequence(batch["weights"], batch)
    return jnp.sum(weights[..., None] * x), jnp.sum(weights)


def row_loss(model, x, batch):
    """The mean of x times the token's target."""
    weights, targets = (local_sequence(batch[name], batch) for name in ("weights", "targets"))
    return jnp.sum((weights * targets)[..., None] * x), jnp.sum(weights)


def numbered_batch(rows=8, valid=VALID, seq_len=16) -> dict:
    """Row i has the target i + 1 everywhere and counts valid[i] tokens."""
    valid = np.resize(valid, rows)
    return dict(
        tokens=np.zeros((rows, seq_len), np.int32),
        targets=np.repeat(np.arange(1, rows + 1, dtype=np.int32)[:, None], seq_len, axis=1),
        weights=np.float32(np.arange(seq_len) < valid[:, None]),
    )


def place(plan, canonical):
    """A state from the host, where the plan wants it."""
    return jax.device_put(plan.stored(canonical), plan.shardings)


def gradients(init, loss, layout, batch, key=None):
    """(loss, gradients in the model's own order) of a model under a layout."""
    plan = jp.make_plan(layout, init, devices=jax.devices()[: layout.num_devices])
    value, found = jax.jit(plan.value_and_grad(loss))(place(plan, init()), batch, key)
    return float(value), jax.device_get(plan.canonical(found))


def trainer(init, loss, layout, tx, **options):
    """A function: batches -> (state in the model's own order, metrics of each step)."""

    def both(key=None):
        model = init()
        return model, tx.init(model)

    plan = jp.make_plan(layout, both, devices=jax.devices()[: layout.num_devices])
    step = plan.train_step(tx, loss, **options)

    def run(batches):
        state, metrics = place(plan, both()), []
        for batch in batches:
            state, found = step(state, batch)
            metrics.append({name: value.item() for name, value in jax.device_get(found).items()})
        return jax.device_get(plan.canonical(state)), metrics

    return run


def train(init, loss, layout, tx, batches, **options):
    """(state in the model's own order, metrics of each step) after `plan.train_step`s."""
    return trainer(init, loss, layout, tx, **options)(batches)


def assert_close(got, want, tolerance=1e-5):
    """Every leaf: max|a - b| <= tolerance * max|b|."""
    for path, b in jax.tree_util.tree_flatten_with_path(want)[0]:
        a = dict(jax.tree_util.tree_flatten_with_path(got)[0])[path]
        error, scale = np.abs(np.asarray(a) - b).max(), np.abs(b).max()
        assert np.shape(a) == np.shape(b)
        name = jax.tree_util.keystr(path)
        assert error <= tolerance * scale, f"{name}: {error:.2e} of {scale:.2e}"
    assert jax.tree.structure(got) == jax.tree.structure(want)
