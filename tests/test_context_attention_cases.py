"""Attention of a split sequence: cases from practice, what it skips, sends and refuses."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_context_attention import (
    ONE_OF_EACH,
    Split,
    arrays,
    assert_close,
    check_on_mesh,
    dense,
    mask_of,
    mesh_of,
    name,
    segments_of,
    taken,
    with_gradients,
)

import jaxpar as jp
from jaxpar.nn import Context, tiles
from jaxpar.nn.blocks import Ring, _tile_shape
from jaxpar.nn.context_attention import attend
from jaxpar.nn.order import document_places, inverse
from jaxpar.nn.sight import Rule, Tokens, seen

RING, ULYSSES, GATHER, BOTH = ONE_OF_EACH


# haoliuhl/ringattention#9
def test_three_of_six_devices_split_a_row_of_24():
    check_on_mesh(mesh_of(data=2, context=3), arrays(24), segments_of((3, 5, 1, 7), 24))


# hiyouga/LlamaFactory PR#10794: gradients of copied kv heads were not summed
@pytest.mark.parametrize("split", [Split("ulysses", 4), Split("ring", 4)], ids=name)
def test_two_kv_heads_of_four_heads_get_the_gradients_of_all_their_copies(split):
    check_on_mesh(mesh_of(context=4), arrays(16, heads=4), **split.options)


# AI-Hypercomputer/maxtext PR#2011
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "whole"])
def test_a_balanced_and_a_plain_order_agree_with_and_without_documents(order, packed):
    segments = segments_of((3, 5, 1, 7), 16) if packed else None
    check_on_mesh(mesh_of(context=4), arrays(16), segments, order=order)


# pytorch/pytorch#152261: results came back in the order of the split
@pytest.mark.parametrize("length", [8, 13, 32])
def test_a_token_that_sees_itself_alone_gets_its_own_value_back(length):
    q, k, v, _ = arrays(length, kv_heads=8)
    attention = functools.partial(jp.attention, window=1, mesh=mesh_of(context=4))
    found = jax.jit(attention)(q, k, v)
    np.testing.assert_array_equal(found, v)


# pytorch/pytorch#152261
@pytest.mark.parametrize("length", range(8, 33, 8))
def test_an_order_and_its_inverse_give_the_row_back(length):
    for split, order in itertools.product(ONE_OF_EACH, ("zigzag", "contiguous")):
        places = split.places(length, order)
        np.testing.assert_array_equal(np.sort(places), np.arange(length))
        np.testing.assert_array_equal(places[inverse(places)], np.arange(length))


def check_padding(inputs, segments, kernel, split, replaced=1):
    """Padding has an output and gradients of 0; what is padding in every row may be `replaced`."""
    attention = functools.partial(
        jp.attention, mesh=mesh_of(context=split.context), segment_ids=segments, kernel=kernel,
        **split.options,
    )  # fmt: skip
    q, *kv, gradient = inputs
    padding = (segments < 0)[..., None, None]
    kv = [np.where(padding.all(axis=0), np.float32(replaced), a) for a in kv]
    found = jax.jit(with_gradients(attention))(q, *kv, gradient)
    assert_close(found, dense(*inputs, mask_of(segments.shape[1], segments)))
    for array in found:
        assert (np.where(padding, array, 0) == 0).all()


@pytest.mark.parametrize("split", [Split("ring", 2), ULYSSES], ids=name)
def test_a_kernel_gives_0_to_padding_and_to_rows_of_padding(split):
    segments = segments_of((3, 5, 1, 7), 16)
    segments[0, 9:], segments[1] = -1, -1
    check_padding(arrays(16), segments, "xla", split)


@pytest.mark.parametrize("split", ONE_OF_EACH, ids=name)
def test_tiles_of_padding_are_skipped_even_where_they_are_nan(split, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", 4)
    segments = np.repeat(np.int32([[0, -1], [-1, -1]]), (24, 8), axis=1)
    check_padding(arrays(32), segments, "blockwise", split, np.nan)


# jax-ml/jax#28974: a row of scores that is masked in the first block was NaN ever after
@pytest.mark.parametrize("kernel", ["blockwise", "xla"])
@pytest.mark.parametrize("shift", [2, 4])
def test_a_query_may_see_nothing_of_the_first_block(shift, kernel):
    inputs, context = arrays(8), Context(ring=2, order="contiguous")
    places = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    rolled = np.roll(places, -shift, axis=1)  # with 4, device 0 begins with the keys of device 1

    def attention(q, k, v, queries, keys):
        return attend(
            context, kernel, Rule(), q, k, v, Tokens(queries), Tokens(keys), in_order=False
        )

    spread = P(None, "context")
    run = jax.jit(jax.shard_map(
        with_gradients(attention), mesh=mesh_of(context=2),
        in_specs=(spread,) * 5 + (P(),), out_specs=spread,
    ))  # fmt: skip
    q, k, v, gradient = inputs
    found = run(q, *taken(rolled, k, v), gradient, places, rolled)
    want = dense(*inputs, mask_of(8))
    assert_close(found, (*want[:2], *taken(rolled, *want[2:])))


# jax-ml/jax#28974
@pytest.mark.parametrize("sizes, is_causal", [((4,), False), ((4, 12), False), ((1,) * 4, True)])
def test_a_block_may_be_of_other_documents_alone(sizes, is_causal, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", 2)
    segments = segments_of(sizes, 16)
    if len(sizes) == 4:  # one token of each document on each device
        segments = segments % 4
    check_on_mesh(mesh_of(context=4), arrays(16), segments, is_causal=is_causal, order="contiguous")


@pytest.mark.parametrize("split, kernel, sizes, rule", [
    (RING, "xla", None, dict(is_causal=False)), (GATHER, "blockwise", (9, 4), dict(window=3)),
    (ULYSSES, "xla", (9, 4), dict(window=3, is_causal=False)),
    (BOTH, "blockwise", (9, 4), dict(is_causal=False)),
], ids=name)  # fmt: skip
def test_queries_may_see_later_keys_and_windows_end_with_documents(split, kernel, sizes, rule):
    segments = None if sizes is None else segments_of(sizes, 16)
    mesh = mesh_of(context=split.context)
    check_on_mesh(mesh, arrays(16), segments, kernel=kernel, **rule, **split.options)


# NVIDIA/Megatron-LM PR#5243
def test_a_zigzag_of_each_of_two_documents_on_two_devices():
    inputs, segments = arrays(8), np.repeat(np.int32([[0, 1]] * 2), 4, axis=1)
    order = np.asarray(document_places(segments, Context(ring=2)))
    positions = np.tile(np.arange(4, dtype=np.int32), (2, 2))
    places, documents = taken(order, positions, segments)
    assert order[0, :4].tolist() == [0, 3, 4, 7] and places[0, :4].tolist() == [0, 3, 0, 3]

    def attention(q, k, v, positions, segment_ids):
        return jp.attention(q, k, v, positions=positions, segment_ids=segment_ids)

    spread = P(None, "context")
    run = jax.jit(jax.shard_map(
        with_gradients(attention), mesh=mesh_of(context=2), in_specs=spread, out_specs=spread
    ))  # fmt: skip
    found = run(*taken(order, *inputs), places, documents)
    assert_close(found, taken(order, *dense(*inputs, mask_of(8, segments))))


# NVIDIA/Megatron-LM PR#4495
@pytest.mark.parametrize("context, kernel", [(2, "xla"), (4, "blockwise")])
def test_documents_of_3_5_and_1_tokens_in_a_row_of_16(context, kernel):
    segments = np.repeat(np.int32([[0, 1, 2, -1]] * 2), (3, 5, 1, 7), axis=1)
    check_on_mesh(mesh_of(context=context), arrays(16), segments, kernel=kernel)


def test_a_mesh_may_have_explicit_axes():
    check_on_mesh(jax.make_mesh((2,), ("context",)), arrays(8))


def tiles_seen(context: Context, length: int) -> np.ndarray:
    """How many tiles of scores each device computes."""
    places = jp.nn.places(length, context)
    size = _tile_shape(Ring(context), places.shape[1]).block
    masks = [seen(Rule(), Tokens(mine[None]), Tokens(places.reshape(1, -1)))[0] for mine in places]
    shape = (-1, size, length // size, size)
    return np.array([mask.reshape(shape).any((1, 3)).sum() for mask in masks])


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_in_zigzag_order_every_device_computes_the_same_number_of_tiles(ring):
    counts = tiles_seen(Context(ring=ring), 4096)
    assert counts.max() < 1.02 * counts.min()
    counts = tiles_seen(Context(ring=ring, order="contiguous"), 4096)
    assert counts.max() > 2 * counts.min()


@pytest.mark.parametrize("split", [RING, GATHER], ids=name)
def test_a_kernel_is_not_called_for_later_keys_even_where_they_are_nan(split):
    inputs = q, k, v, _ = arrays(16)
    attention = functools.partial(
        jp.attention, mesh=mesh_of(context=4), order="contiguous", kernel="xla", **split.options
    )
    found = jax.jit(attention)(
        q, *(np.where(np.arange(16)[:, None, None] < 12, a, np.nan) for a in (k, v))
    )
    want = dense(*inputs, mask_of(16))[0]
    assert np.abs(found - want)[:, :12].max() <= 1e-5 and np.isnan(found[:, 12:]).all()


def sent(function, mesh, *inputs) -> dict:
    """Collective -> (how many a device executes, elements it puts in)."""
    found = {}

    def walk(jaxpr, times):
        for eqn in jaxpr.eqns:
            op = eqn.primitive.name
            if op in ("ppermute", "all_gather", "all_to_all", "reduce_scatter", "psum"):
                count, elements = found.get(op, (0, 0))
                found[op] = count + times, elements + times * eqn.invars[0].aval.size
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(inner, "eqns"):
                    walk(inner, times * eqn.params["length"] if op == "scan" else times)

    spread = P(None, "context")
    walk(jax.make_jaxpr(jax.shard_map(
        function, mesh=mesh, in_specs=spread, out_specs=spread
    ))(*inputs), 1)  # fmt: skip
    return found


@pytest.mark.parametrize("kernel", ["blockwise", "xla"])
@pytest.mark.parametrize("split", [
    Split("ring", 2), RING, Split("ring", 8), Split("allgather", 4), Split("ulysses", 4),
    Split("ring+ulysses", 8, 2), Split("ring+ulysses", 8, 4),
], ids=name)  # fmt: skip
def test_what_a_device_sends_forward_and_backward(split, kernel):
    inputs, mesh, n = arrays(32, kv_heads=4), mesh_of(context=split.context), split.context
    q, kv = inputs[0].size // n, 2 * inputs[1].size // n
    attention = functools.partial(jp.attention, kernel=kernel, **split.options)
    forward = sent(attention, mesh, *inputs[:3])
    both = sent(with_gradients(attention), mesh, *inputs)
    if split.variant == "allgather":
        assert forward == {"all_gather": (1, kv)}
        assert both == {"all_gather": (2, 2 * kv), "reduce_scatter": (1, n * kv)}
        return
    want = {}
    if split.variant != "ring":
        want["all_to_all"], n = (3, 2 * q + kv), n // (split.ulysses or n)
    if n > 1:
        want["ppermute"] = n - 1, (n - 1) * kv
    assert forward == want
    times = dict(all_to_all=2, ppermute=3)
    assert both == {op: (times[op] * a, times[op] * b) for op, (a, b) in want.items()}


BAD = [
    (dict(heads=6, variant="ulysses"), "4 devices of context=4 exchange heads, .* has 6 heads"),
    (dict(heads=8, kv_heads=3), "q has 8 heads, not a multiple of the 3 of k and v"),
    (dict(ulysses=2), "ulysses=2 needs attention='ring.ulysses'"),
    (dict(variant="ring+ulysses"), "needs ulysses, how many of context=4 exchange heads"),
    (dict(variant="ring+ulysses", ulysses=3), "ulysses=3 does not; use ulysses=2$"),
    (dict(variant="ring+ulysses", ulysses=2, sizes=dict(context=2)), "use ring or ulysses$"),
    (dict(window=0), "window=0 is no number of tokens from 1 up; use 1"),
    (dict(variant="rings"), "variant='rings' is not a choice; did you mean 'ring'"),
    (dict(order="zigzg"), "order='zigzg' is not a choice; did you mean 'zigzag'"),
    (dict(kernel="blockwize"), "kernel='blockwize' is not a choice; did you mean 'blockwise'"),
    (dict(sizes=dict(contxt=4)), "the mesh has no axis 'context'; did you mean 'contxt'"),
    (dict(segment_ids=np.zeros((2, 8), int)), r"segment_ids has shape \(2, 8\); it must be \(2, 1"),
    (dict(positions=np.zeros(16, int)), r"positions has shape \(16,\); it must be \(2, 16\)"),
]


@pytest.mark.parametrize("wrong, sentence", BAD, ids=lambda case: case if type(case) is str else "")
def test_what_cannot_work_is_refused_in_a_sentence(wrong, sentence):
    sizes = {key: wrong.pop(key) for key in ("heads", "kv_heads") if key in wrong}
    mesh = mesh_of(**wrong.pop("sizes", dict(context=4)))
    with pytest.raises(ValueError, match=sentence):
        jp.attention(*arrays(16, **sizes)[:3], mesh=mesh, **wrong)


@pytest.mark.parametrize("cut", [
    lambda q, k, v: (q, k, v[:, :8]), lambda q, k, v: (q[:, :8], k, v),
    lambda q, k, v: (q, k[..., :4], v[..., :4]), lambda q, k, v: (q[0], q[0], q[0]),
])  # fmt: skip
def test_arrays_that_do_not_fit_are_refused_in_a_sentence(cut):
    with pytest.raises(ValueError, match=r"do not fit: q is \[B, T, N, H\], k and v"):
        jp.attention(*cut(*arrays(16)[:3]))


@pytest.mark.parametrize("length, use", [(13, "8 or 16"), (3, "8")])
def test_a_length_that_does_not_divide_is_refused_with_the_nearest(length, use):
    with pytest.raises(ValueError, match=f"{length} is not a multiple of 8, .* use {use}$"):
        jp.nn.places(length, Context(ring=4))
