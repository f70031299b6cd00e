"""Splitting layers over stages, and the mapping between canonical and storage order."""

import itertools

import numpy as np
import pytest

from jaxpar.pipeline.schedules import ring, v_shape
from jaxpar.pipeline.split import canonical_order, split_layers, storage_order


def test_thirty_layers_on_four_stages_are_all_kept_earlier_stages_first():
    assert split_layers(30, 4) == (8, 8, 7, 7)
    assert split_layers(5, 4) == (2, 1, 1, 1)
    assert split_layers(30, 4, chunks=2) == (4, 4, 4, 4, 4, 4, 3, 3)
    assert split_layers(8, 4, chunks=2) == (1,) * 8


def test_head_and_embedding_take_layers_from_their_parts():
    assert split_layers(30, 4, head_cost=0.5) == (8, 8, 7, 7)  # costs 8, 8, 7, 7.5
    assert split_layers(30, 4, head_cost=1) == (8, 8, 8, 6)  # as good as 8, 8, 7, 7: earlier more
    assert split_layers(30, 4, head_cost=2) == (8, 8, 8, 6)
    assert split_layers(30, 4, head_cost=2, embed_cost=4) == (5, 9, 9, 7)
    assert split_layers(4, 4, head_cost=3) == (2, 1, 1, 0)


def rank(counts, extra):
    """The largest cost first, then the next; of equal ones, the most layers early."""
    costs = sorted((float(n + e) for n, e in zip(counts, extra, strict=True)), reverse=True)
    return costs, [-n for n in counts]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize(("head", "embed"), [(0, 0), (0.4, 0), (1.5, 0), (2, 1), (5, 0.7), (0, 3)])
def test_the_split_is_the_best_of_all_splits(parts, head, embed):
    extra = np.zeros(parts)
    extra[0] += embed
    extra[-1] += head
    for layers in range(parts, 9):
        every = (c for c in itertools.product(range(layers + 1), repeat=parts) if sum(c) == layers)
        best = min(every, key=lambda c: rank(c, extra))
        assert split_layers(layers, parts, head_cost=head, embed_cost=embed) == best


def test_equal_layers_without_head_cost_differ_by_one_and_never_grow():
    for layers, parts in itertools.product(range(1, 40), range(1, 9)):
        if layers >= parts:
            counts = split_layers(layers, parts)
            assert sum(counts) == layers and max(counts) - min(counts) <= 1
            assert list(counts) == sorted(counts, reverse=True)


def test_given_counts_are_kept_and_wrong_ones_refused_with_counts_that_work():
    assert split_layers(30, 4, counts=[9, 8, 8, 5]) == (9, 8, 8, 5)
    assert split_layers(2, 3, counts=[1, 0, 1]) == (1, 0, 1)
    for counts, says in [
        ([8, 8, 7], "has 3 entries"),
        ([8, 8, 7, 8], "sum to 31"),
        ([16, 8, 7, -1], "an entry that is no count"),
        ([7.5, 7.5, 7, 8], "an entry that is no count"),
    ]:
        with pytest.raises(ValueError, match=says) as refusal:
            split_layers(30, 4, counts=counts)
        assert "pipe=4 x chunks=1 needs 4 counts" in str(refusal.value)
        assert str(refusal.value).endswith("use [8, 8, 7, 7]")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((3, 4, 2), "pipe=4 x chunks=2 = 8 parts .* use pipe=3 with chunks=1 or at least 8 layers"),
        ((7, 4, 2), "num_layers=7 on .* use chunks=1 or at least 8 layers"),
        ((11, 2, 6), "= 12 parts .* use chunks=5 or at least 12 layers"),
        ((0, 1, 1), "num_layers=0: a split needs at least 1"),
        ((4, 2, 0), "chunks=0: a split needs at least 1"),
    ],
)
def test_parts_without_a_layer_are_refused_with_the_nearest_that_works(sizes, says):
    with pytest.raises(ValueError, match=says):
        split_layers(*sizes)


def test_a_negative_head_cost_is_refused():
    with pytest.raises(ValueError, match="head_cost=-1: a cost in layers is finite and >= 0"):
        split_layers(4, 2, head_cost=-1)


@pytest.mark.parametrize("placement", [ring, v_shape])
def test_storage_order_holds_each_layer_once_where_its_part_lives(placement):
    for stages, chunks, layers in [(1, 1, 3), (4, 1, 30), (4, 2, 30), (2, 3, 7), (3, 4, 12)]:
        counts = split_layers(layers, stages, chunks)
        order = storage_order(counts, stages, chunks, placement)
        assert order.shape == (stages, chunks, max(counts))
        assert sorted(order[order >= 0]) == list(range(layers))
        starts = np.cumsum((0, *counts))
        for stage, chunk in itertools.product(range(stages), range(chunks)):
            part = placement(stage, chunk, stages, chunks)
            row = order[stage, chunk]
            assert row[row >= 0].tolist() == list(range(starts[part], starts[part + 1]))
            assert (row[counts[part] :] == -1).all()
        stored = np.where(order >= 0, order * 10, -999)
        places = canonical_order(order)
        assert stored.reshape(-1)[places].tolist() == [10 * n for n in range(layers)]


def test_storage_order_of_interleaved_and_v_shaped_stages_by_hand():
    counts = (2, 1, 1, 1)
    assert storage_order(counts, 2, 2).tolist() == [[[0, 1], [3, -1]], [[2, -1], [4, -1]]]
    assert storage_order(counts, 2, 2, v_shape).tolist() == [[[0, 1], [4, -1]], [[2, -1], [3, -1]]]


def test_storage_order_refuses_counts_of_another_split():
    with pytest.raises(ValueError, match="has 3 entries: pipe=2 x chunks=2 needs 4 counts"):
        storage_order((2, 2, 2), 2, 2)
