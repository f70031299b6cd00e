"""Attention of a split sequence is dense attention: its output, gradients and Jacobian."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.nn import tiles


class Split(NamedTuple):
    """Who holds what; the `ulysses` devices of a ring+ulysses."""

    variant: str
    context: int
    ulysses: int | None = None

    def __str__(self) -> str:
        return "-".join(str(part) for part in self if part)

    @property
    def options(self) -> dict:
        return dict(variant=self.variant, ulysses=self.ulysses)

    def places(self, length: int, order: str = "zigzag") -> np.ndarray:
        """The row's tokens in the order in which devices hold them."""
        ulysses = self.context if self.variant == "ulysses" else self.ulysses or 1
        context = jp.nn.Context(ring=self.context // ulysses, ulysses=ulysses, order=order)
        return jp.nn.places(length, context).reshape(-1)


VARIANTS = ("ring", "ulysses", "allgather")
SPLITS = [Split(variant, context) for variant in VARIANTS for context in (2, 4, 8)]
SPLITS += [Split("ring+ulysses", *sizes) for sizes in ((4, 2), (8, 2), (8, 4))]
ONE_OF_EACH = [Split("ring", 4), Split("ulysses", 2), Split("allgather", 2), SPLITS[-3]]
MASKS = {"causal": {}, "window": dict(window=7), "documents": dict(documents=(3, 5, 1, 7))}
KERNELS = ("blockwise", "xla")
PRODUCT = list(itertools.product(SPLITS, MASKS, (8, 2, 1), (8, 13, 24, 31, 64), KERNELS))
"""split, mask, kv heads, length, kernel"""


def covering() -> list:
    """Cases of PRODUCT in which every two values of it meet that meet at all."""

    @functools.cache
    def pairs(case):
        (variant, context, _), *others = case
        values = enumerate((variant, context, *others))
        return frozenset(itertools.combinations(values, 2))

    missing, chosen = set().union(*map(pairs, PRODUCT)), []
    while missing:
        chosen.append(max(PRODUCT, key=lambda case: len(missing & pairs(case))))
        missing -= pairs(chosen[-1])
    return chosen


def name(case) -> str:
    """A case's test id."""
    return "-".join(map(str, case)) if type(case) is tuple else str(case)


COVERING = covering()


def mesh_of(**sizes) -> Mesh:
    count = np.prod([*sizes.values()])
    return Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))


def arrays(length: int, kv_heads: int = 2, heads: int = 8, batch: int = 2) -> list:
    """q, k, v, and a gradient of the output."""
    rng = np.random.default_rng(length)
    counts = (heads, kv_heads, kv_heads, heads)
    return [rng.normal(size=(batch, length, n, 8)).astype(np.float32) for n in counts]


def segments_of(sizes, length: int) -> np.ndarray:
    """int32 [2, length], documents of these sizes over and over; the second row's start later."""
    rows = [np.repeat(np.arange(length), np.resize(np.roll(sizes, -i), length)) for i in (0, 1)]
    return np.stack([row[:length] for row in rows]).astype(np.int32)


def mask_of(length: int, segments=None, window=None, is_causal=True) -> np.ndarray:
    """bool [B or 1, T, T], True where a query sees a key."""
    distance = np.arange(length)[:, None] - np.arange(length)
    mask = (distance >= 0 if is_causal else distance == distance)[None]
    if window is not None:
        mask = mask & (abs(distance) < window)
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, None]
    return mask


def dense(q, k, v, gradient, mask):
    """out, dq, dk, dv of softmax(q . k / sqrt(H)) . v with the whole matrix of scores."""
    group, scale = q.shape[2] // k.shape[2], np.float32(q.shape[-1] ** -0.5)
    keys, values = (np.repeat(a, group, axis=2) for a in (k, v))
    scores = np.where(mask[:, None], np.einsum("btnh,bsnh->bnts", q, keys) * scale, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    d_weights = np.einsum("btnh,bsnh->bnts", gradient, values)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    dk, dv = (
        np.einsum("bnts,btnh->bsnh", a, b).reshape(*k.shape[:3], group, -1).sum(3)
        for a, b in ((d_scores, q), (weights, gradient))
    )
    out = np.einsum("bnts,bsnh->btnh", weights, values)
    return out, np.einsum("bnts,bsnh->btnh", d_scores, keys), dk, dv


def with_gradients(attention):
    """(q, k, v, gradient of out, ...) -> (out, dq, dk, dv)."""

    def run(q, k, v, gradient, *more):
        out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, *more), q, k, v)
        return out, *pullback(gradient)

    return run


def assert_close(found, want, tolerance=1e-5):
    """Each of out, dq, dk, dv: max|a - b| <= tolerance * max|b|."""
    for label, a, b in zip(("out", "dq", "dk", "dv"), found, want, strict=True):
        error, scale = np.abs(np.float32(a) - b).max(), np.abs(b).max()
        assert np.shape(a) == np.shape(b)
        assert error <= tolerance * scale, f"{label}: {error:.2e} of {scale:.2e}"


def check_on_mesh(mesh, inputs, segments=None, window=None, is_causal=True, **options):
    """`attention` with `mesh` against dense attention."""
    shared = dict(window=window, is_causal=is_causal)
    attention = functools.partial(
        jp.attention, mesh=mesh, segment_ids=segments, **shared, **options
    )
    found = jax.jit(with_gradients(attention))(*inputs)
    assert_close(found, dense(*inputs, mask_of(inputs[0].shape[1], segments, **shared)))


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4, so that a device's part of a short row has several."""
    monkeypatch.setattr(tiles, "BLOCK", 4)


def check(case):
    split, mask, kv_heads, length, kernel = case
    sizes, window = (MASKS[mask].get(name) for name in ("documents", "window"))
    segments = None if sizes is None else segments_of(sizes, length)
    mesh, inputs = mesh_of(context=split.context), arrays(length, kv_heads)
    check_on_mesh(mesh, inputs, segments, window, kernel=kernel, **split.options)


@pytest.mark.parametrize("case", COVERING, ids=name)
def test_output_and_gradients_are_those_of_dense_attention(case, small_tiles):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in PRODUCT if case not in COVERING], ids=name)
def test_output_and_gradients_are_those_of_dense_attention_full(case, small_tiles):
    check(case)


def check_jacobian(split, kernel):
    one = [a[..., :2] for a in arrays(16, heads=4, batch=1)[:3]]
    outputs = one[0].size
    gradient = np.eye(outputs, dtype=np.float32).reshape(outputs, *one[0].shape[1:])
    q, k, v = (np.repeat(a, outputs, axis=0) for a in one)
    segments = segments_of((3, 5, 1, 7), 16)[:1]
    attention = functools.partial(
        jp.attention, mesh=mesh_of(context=split.context), kernel=kernel,
        segment_ids=np.repeat(segments, outputs, axis=0), **split.options,
    )  # fmt: skip
    found = jax.jit(with_gradients(attention))(q, k, v, gradient)[1:]
    # [T x N x H, T, N, H] -> [T, T]: whether any of this query's depends on any of that token's
    by_q, by_k, by_v = (
        (np.asarray(a) != 0).reshape(16, -1, 16, a[0, 0].size).any((1, 3)) for a in found
    )
    seen = mask_of(16, segments)[0]
    alone = seen.sum(1) == 1  # a softmax over one key is 1, whatever the score
    assert (by_v == seen).all()
    assert (by_k == seen & ~alone[:, None]).all()
    assert (by_q == np.diag(~alone)).all()


SMALL = [split for split in SPLITS if split.context <= 4]


@pytest.mark.parametrize("split", [split for split in SMALL if split.context == 4], ids=name)
def test_the_jacobian_is_exactly_zero_where_a_query_does_not_see(split, small_tiles):
    check_jacobian(split, "blockwise")


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("split", SMALL, ids=name)
def test_the_jacobian_is_exactly_zero_where_a_query_does_not_see_full(split, kernel):
    check_jacobian(split, kernel)


def taken(order, *inputs) -> list:
    """Each array [B, T, ...] with its tokens in this order, int [B, T]."""
    rows = np.arange(len(order))[:, None]
    return [a[rows, order] for a in inputs]


def check_in_shard_map(split, order, check_vma, kernel):
    """In a shard_map of the user's own: out and gradients, all in the order of the devices."""
    inputs, segments = arrays(16), segments_of((3, 5, 1, 7), 16)
    if order == "shuffled":  # each row in its own way
        taking = np.random.default_rng(0).permuted(np.tile(np.arange(16), (2, 1)), axis=1)
    else:
        taking = np.tile(split.places(16, order), (2, 1))
    starts = np.maximum.accumulate(
        np.where(np.diff(segments, prepend=-1) != 0, np.arange(16), 0), axis=1
    )
    more = {"segment_ids": segments}
    if order == "shuffled":
        more["positions"] = np.arange(16) - starts
    names, options = list(more), dict(kernel=kernel, **split.options)
    if order == "zigzag":
        options["order"] = order

    def attention(q, k, v, *more):
        return jp.attention(q, k, v, **dict(zip(names, more, strict=True)), **options)

    spread = P(None, "context")
    run = jax.jit(jax.shard_map(
        with_gradients(attention), mesh=mesh_of(context=split.context), in_specs=spread,
        out_specs=spread, check_vma=check_vma,
    ))  # fmt: skip
    found = run(*taken(taking, *inputs, *more.values()))
    assert_close(found, taken(taking, *dense(*inputs, mask_of(16, segments))))


OWN = list(itertools.product(
    ONE_OF_EACH, ("contiguous", "zigzag", "shuffled"), (True, False), KERNELS
))  # fmt: skip
OWN_COVERING = [case for i, case in enumerate(OWN) if i % 4 == i // 4 % 4]


@pytest.mark.parametrize("case", OWN_COVERING, ids=name)
def test_in_a_shard_map_of_ones_own_any_order_of_tokens_is_right(case):
    check_in_shard_map(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in OWN if case not in OWN_COVERING], ids=name)
def test_in_a_shard_map_of_ones_own_any_order_of_tokens_is_right_full(case):
    check_in_shard_map(*case)


@pytest.mark.parametrize("split, kv_heads", [
    (Split("ring", 2), 2), *zip(ONE_OF_EACH[1:], (1, 2, 2), strict=True),
], ids=name)  # fmt: skip
def test_with_the_batch_over_data_and_heads_over_tensor_gradients_are_those_of_dense_attention(
    split, kv_heads
):
    inputs, segments = arrays(16, kv_heads), segments_of((3, 5, 1, 7), 16)
    mesh = mesh_of(data=4 // split.context, context=split.context, tensor=2)
    row, spread = P("data", "context"), P("data", "context", "tensor")
    keys = spread if kv_heads > 1 else row  # one head, which all use

    def attention(q, k, v, segment_ids):
        return jp.attention(q, k, v, segment_ids=segment_ids, **split.options)

    run = jax.jit(jax.shard_map(
        with_gradients(attention), mesh=mesh, in_specs=(spread, keys, keys, spread, row),
        out_specs=(spread, spread, keys, keys),
    ))  # fmt: skip
    assert_close(run(*inputs, segments), dense(*inputs, mask_of(16, segments)))


@pytest.mark.parametrize("split", ONE_OF_EACH, ids=name)
def test_bf16_inputs_give_bf16_gradients_to_bf16_accuracy(split):
    inputs = [a.astype(jnp.bfloat16) for a in arrays(32)]
    kernel = KERNELS[ONE_OF_EACH.index(split) % 2]
    attention = functools.partial(
        jp.attention, mesh=mesh_of(context=split.context), kernel=kernel, **split.options
    )
    found = jax.jit(with_gradients(attention))(*inputs)
    assert {a.dtype for a in found} == {jnp.dtype(jnp.bfloat16)}
    assert_close(found, dense(*map(np.float32, inputs), mask_of(32)), tolerance=2e-2)
