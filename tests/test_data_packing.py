"""Packing: every token predicted once, no token sees another document, rows without state."""

import time

import numpy as np
import pytest

from jaxpar.data import Documents, documents_from_arrays, host_batch, pack_rows, rows_per_epoch
from jaxpar.data.permutation import key_of, permute

KEYS = {"tokens", "targets", "weights", "segment_ids", "positions"}
LENGTHS = [1, 7, 16, 2, 33, 1, 5, 8, 100, 3, 12]


def id_documents(lengths=LENGTHS) -> Documents:
    """Document d has the tokens 1000 d + 1, 1000 d + 2, ...: a token says where it came from."""
    return documents_from_arrays([1000 * d + 1 + np.arange(n) for d, n in enumerate(lengths)])


def epoch_rows(documents, seq_len, seed, epoch=0):
    count = rows_per_epoch(documents, seq_len)
    return pack_rows(documents, epoch * count + np.arange(count), seq_len=seq_len, seed=seed)


def packed_by_hand(token_lists, seq_len):
    """An independent packer: token by token, with lists."""
    flat = []
    for document in token_lists:
        for i, token in enumerate(document):
            last = i + 1 == len(document)
            flat.append((token, 0 if last else document[i + 1], 0.0 if last else 1.0, i == 0))
    rows = []
    while flat:
        row, flat = flat[:seq_len], flat[seq_len:]
        segment, position, out = 0, 0, []
        for column, (token, target, weight, first) in enumerate(row):
            if first or column == 0:
                segment, position = segment + 1, 0
            out.append((token, target, weight, segment, position))
            position += 1
        rows.append(out + [(0, 0, 0.0, 0, 0)] * (seq_len - len(out)))
    return np.array(rows)


@pytest.mark.parametrize("seq_len", [1, 2, 5, 16, 64, 300])
def test_rows_in_canonical_order_equal_those_packed_by_hand(seq_len):
    documents = id_documents()
    expected = packed_by_hand([documents[i].tolist() for i in range(len(documents))], seq_len)
    rows = epoch_rows(documents, seq_len, seed=None)
    names = ("tokens", "targets", "weights", "segment_ids", "positions")
    for i, name in enumerate(names):
        np.testing.assert_array_equal(rows[name], expected[:, :, i], name)
        assert rows[name].dtype == (np.float32 if name == "weights" else np.int32)


@pytest.mark.parametrize("seq_len", [3, 16, 64])
@pytest.mark.parametrize("seed,epoch", [(0, 0), (0, 1), (7, 0), (7, 5)])
def test_every_token_is_read_once_and_predicted_exactly_once_per_epoch(seq_len, seed, epoch):
    rows = epoch_rows(id_documents(), seq_len, seed, epoch)
    every = [1000 * d + 1 + i for d, n in enumerate(LENGTHS) for i in range(n)]
    with_predecessor = [token for token in every if token % 1000 != 1]
    assert sorted(rows["tokens"][rows["segment_ids"] > 0].tolist()) == sorted(every)
    counted = rows["weights"] == 1
    assert sorted(rows["targets"][counted].tolist()) == sorted(with_predecessor)
    np.testing.assert_array_equal(rows["targets"][counted], rows["tokens"][counted] + 1)
    assert not rows["targets"][~counted].any()
    assert set(np.unique(rows["weights"])) <= {0.0, 1.0}


@pytest.mark.parametrize("seq_len", [5, 16, 64])
def test_a_token_attends_to_no_other_document_and_positions_count_within_the_piece(seq_len):
    rows = epoch_rows(id_documents(), seq_len, seed=3)
    segment, real = rows["segment_ids"], rows["segment_ids"] > 0
    document, place = rows["tokens"] // 1000, rows["tokens"] % 1000
    causal = np.tri(seq_len, dtype=bool)
    attends = (segment[:, :, None] == segment[:, None, :]) & causal
    same = document[:, :, None] == document[:, None, :]
    both_real = real[:, :, None] & real[:, None, :]
    np.testing.assert_array_equal(attends & both_real, same & both_real & causal)
    assert not (attends & (real[:, :, None] != real[:, None, :])).any()
    # Going back by its position, each token reaches its piece's first one in the same row.
    column = np.arange(seq_len) - rows["positions"]
    first = np.take_along_axis(place, column, axis=1)
    np.testing.assert_array_equal((place - rows["positions"])[real], first[real])
    starts = (segment != np.roll(segment, 1, axis=1)) | (np.arange(seq_len) == 0)
    np.testing.assert_array_equal((rows["positions"] == 0)[real], starts[real])


def test_rows_asked_for_in_pieces_and_in_any_order_are_equal():
    documents = id_documents()
    whole = pack_rows(documents, np.arange(40), seq_len=16, seed=1)
    order = np.random.default_rng(0).permutation(40)
    pieces = [
        pack_rows(documents, part, seq_len=16, seed=1) for part in np.split(order, [3, 4, 20])
    ]
    for name in KEYS:
        np.testing.assert_array_equal(
            np.concatenate([piece[name] for piece in pieces]), whole[name][order], name
        )


def test_seeds_and_epochs_order_documents_and_rows_differently():
    documents = id_documents([20] * 50)
    firsts = [epoch_rows(documents, 10, seed, epoch)["tokens"] for seed, epoch in
              [(0, 0), (0, 1), (1, 0)]]  # fmt: skip
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert (firsts[one] != firsts[other]).mean() > 0.9
    rows = firsts[0][:, 0] // 1000
    assert (np.diff(rows) != 0).mean() > 0.9  # halves of a document are apart: rows are shuffled


def test_a_negative_row_number_is_an_empty_row():
    rows = pack_rows(id_documents(), np.array([-1, 0]), seq_len=8, seed=0)
    assert all(not rows[name][0].any() for name in KEYS)
    assert rows["segment_ids"][1].all()


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1024, 5000])
def test_permute_is_a_permutation_for_every_size_and_key(size):
    seen = set()
    for key in range(5):
        out = permute(np.arange(size), size, key)
        assert sorted(out.tolist()) == list(range(size))
        seen.add(tuple(out.tolist()))
    assert len(seen) == 5 or size < 10


def test_permutations_are_spread_evenly():
    index = np.arange(10)
    landed = [permute(index, 10, key_of("test", key)) for key in range(4000)]
    counts = np.stack([np.bincount(column, minlength=10) for column in np.array(landed).T])
    assert np.abs(counts - 400).max() < 5 * np.sqrt(400)  # five standard deviations


def test_permutations_never_change_between_releases_and_machines():
    assert key_of("rows", 0, 0) == 15813296421295393522
    assert permute(np.arange(8), 8, 1).tolist() == [7, 0, 2, 4, 1, 6, 5, 3]


def test_a_batch_of_32_rows_of_256_tokens_is_built_in_a_few_milliseconds():
    documents = documents_from_arrays([np.zeros(n % 400 + 1, np.uint8) for n in range(5000)])
    host_batch(documents, 0, 0, 32, 256)
    times = []
    for step in range(20):
        begin = time.perf_counter()
        host_batch(documents, step, 0, 32, 256)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.005
