"""Data: batches on the mesh, resume, processes, the held-out split, refused settings."""

import doctest
import importlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.data import (
    Documents,
    batches,
    documents_from_arrays,
    heldout_batches,
    host_batch,
    pack_rows,
    split_documents,
)

# The package gives the name `batches` to the function; the module is found by its path.
local_rows = importlib.import_module("jaxpar.data.batches").local_rows

KEYS = {"tokens", "targets", "weights", "segment_ids", "positions"}
LENGTHS = [1, 7, 16, 2, 33, 1, 5, 8, 100, 3, 12]


def id_documents(lengths=LENGTHS) -> Documents:
    """Document d has the tokens 1000 d + 1, 1000 d + 2, ...: a token says where it came from."""
    return documents_from_arrays([1000 * d + 1 + np.arange(n) for d, n in enumerate(lengths)])


def assert_same(one, other):
    assert set(one) == set(other) == KEYS
    for name in KEYS:
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), name)


@pytest.fixture(scope="module")
def devices():
    try:
        jax.config.update("jax_num_cpu_devices", 8)
    except (RuntimeError, ValueError):  # the backend runs already, or another setting asks for 8
        pass
    assert len(jax.devices()) >= 8, "run these tests alone, or with 8 emulated devices"
    return np.array(jax.devices()[:8])


def make_plan(devices, axes: dict, spec: PartitionSpec):
    mesh = Mesh(
        devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
    return types.SimpleNamespace(mesh=mesh, batch_sharding=NamedSharding(mesh, spec))


# --- batches, resume, processes ------------------------------------------------------------------


def test_resume_at_any_step_gives_the_same_15_batches_of_10_samples_in_3_epochs():
    documents = id_documents([4] * 10)
    options = dict(global_batch=2, seq_len=4, split="all")
    run = list(batches(documents, **options, steps=15))
    assert len(run) == 15
    samples = np.concatenate([batch["tokens"][:, 0] // 1000 for batch in run])
    for epoch in samples.reshape(3, 10):
        assert sorted(epoch.tolist()) == list(range(10))
    for start in (0, 4, 5, 6, 14, 15):
        resumed = list(batches(documents, **options, start=start, steps=15 - start))
        assert len(resumed) == 15 - start
        for one, other in zip(run[start:], resumed, strict=True):
            assert_same(one, other)


def test_a_batch_over_the_border_of_epochs_has_no_gap_and_no_repeat():
    documents = id_documents([4] * 10)
    run = [host_batch(documents, step, 0, 4, 4)["tokens"][:, 0] // 1000 for step in range(5)]
    for epoch in np.concatenate(run).reshape(2, 10):
        assert sorted(epoch.tolist()) == list(range(10))


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_any_number_of_processes_reads_the_same_global_batch(parts):
    documents = id_documents()
    whole = host_batch(documents, 3, 5, 8, 16)
    shares = np.split(np.arange(8), parts)
    read = [host_batch(documents, 3, 5, 8, 16, rows=share) for share in shares]
    assert_same(whole, {name: np.concatenate([part[name] for part in read]) for name in KEYS})
    assert_same(host_batch(documents, 3, 5, 8, 16, rows=slice(2, 4)),
                {name: whole[name][2:4] for name in KEYS})  # fmt: skip


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_do_not_end_and_equal_host_batches_whatever_is_fetched_ahead(prefetch):
    documents = id_documents()
    stream = batches(documents, global_batch=4, seq_len=64, start=2, seed=9, split="all",
                     prefetch=prefetch)  # fmt: skip
    for step in range(2, 12):  # more than 9 epochs of 3 rows
        assert_same(next(stream), host_batch(documents, step, 9, 4, 64))
    stream.close()


AXES = [
    ({"data": 8}, PartitionSpec("data")),
    ({"data": 2, "tensor": 4}, PartitionSpec(("data",), None)),
    ({"data": 4, "context": 2}, PartitionSpec("data", "context")),
    ({"pipe": 4, "data": 2}, PartitionSpec("data")),
    ({"replica": 2, "data": 2, "expert": 2}, PartitionSpec(("replica", "data", "expert"))),
    ({"tensor": 8}, PartitionSpec()),
]


@pytest.mark.parametrize("axes,spec", AXES, ids=lambda value: str(value))
def test_global_arrays_have_the_sharding_of_the_plan_and_the_rows_of_the_host_batch(
    devices, axes, spec
):
    plan, documents = make_plan(devices, axes, spec), id_documents()
    stream = batches(documents, plan, global_batch=8, seq_len=16, seed=4, split="all", steps=2)
    for step, batch in enumerate(stream):
        assert_same(batch, host_batch(documents, step, 4, 8, 16))
        for values in batch.values():
            assert values.shape == (8, 16)
            assert values.sharding.is_equivalent_to(plan.batch_sharding, 2)


@pytest.mark.parametrize("axes,spec", AXES, ids=lambda value: str(value))
def test_a_process_reads_the_rows_of_its_own_devices_and_no_others(devices, axes, spec):
    sharding = make_plan(devices, axes, spec).batch_sharding
    everywhere = sharding.devices_indices_map((16, 32))
    union = set()
    for process in range(4):
        mine = {device: everywhere[device] for device in devices[2 * process : 2 * process + 2]}
        fake = types.SimpleNamespace(addressable_devices_indices_map=lambda shape, m=mine: m)
        rows = local_rows(fake, (16, 32)).tolist()
        wanted = {row for index in mine.values() for row in range(16)[index[0]]}
        assert rows == sorted(wanted)
        union |= wanted
    assert union == set(range(16))


def test_global_batch_that_does_not_divide_is_refused_with_the_axis_and_its_size(devices):
    plan = make_plan(devices, {"data": 8, "context": 1}, PartitionSpec("data", "context"))
    with pytest.raises(ValueError) as error:
        batches(id_documents(), plan, global_batch=1, seq_len=8)
    assert str(error.value) == (
        "global_batch 1 is not a multiple of data 8; use context or tensor for one long sequence"
    )
    with pytest.raises(
        ValueError, match=r"global_batch 12 is not a multiple of data 8; use 8 or 16"
    ):
        heldout_batches(id_documents(), plan, global_batch=12, seq_len=8)
    plan = make_plan(devices, {"replica": 2, "data": 2, "context": 2},
                     PartitionSpec(("replica", "data"), "context"))  # fmt: skip
    with pytest.raises(
        ValueError, match=r"batch 2 is not a multiple of replica 2 x data 2 = 4; use"
    ):
        batches(id_documents(), plan, global_batch=2, seq_len=8)
    with pytest.raises(ValueError, match=r"seq_len 9 is not a multiple of context 2; use 8 or 10"):
        batches(id_documents(), plan, global_batch=4, seq_len=9)


# --- held-out ------------------------------------------------------------------------------------


def test_heldout_is_disjoint_from_train_and_together_they_are_all_documents():
    documents = id_documents([5] * 400)
    train, heldout = split_documents(documents)
    first = [{int(part[i][0]) for i in range(len(part))} for part in (train, heldout)]
    assert not first[0] & first[1] and len(first[0] | first[1]) == 400
    assert 8 <= len(heldout) <= 36  # 20 expected
    assert len(split_documents(documents, 0.5)[1]) == pytest.approx(200, abs=50)


def test_a_document_stays_on_its_side_when_others_come_or_go_and_whatever_the_seed():
    names = [f"file{i}.txt" for i in range(400)]
    arrays = [np.array([i, i]) for i in range(1, 401)]

    def held(which):
        some = documents_from_arrays([arrays[i] for i in which], [names[i] for i in which])
        heldout = split_documents(some)[1]
        return {int(heldout[i][0]) for i in range(len(heldout))}

    everything = held(range(400))
    assert held(range(100, 400)) == {token for token in everything if token > 100}
    assert held(range(399, -1, -1)) == everything
    for seed in (0, 1):
        documents = documents_from_arrays(arrays, names)
        stream = batches(documents, global_batch=40, seq_len=10, seed=seed, steps=2)  # an epoch
        seen = np.unique([batch["tokens"] for batch in stream])
        assert set(seen.tolist()) - {0} == set(range(1, 401)) - everything


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("holdout", [0.001, 0.05, 0.5, 0.999])
def test_at_least_one_document_is_held_out_and_never_all(count, holdout):
    train, heldout = split_documents(id_documents([9] * count), holdout)
    assert len(train) >= 1 and len(heldout) >= 1 and len(train) + len(heldout) == count


@pytest.mark.parametrize("lengths", [[1000, 10], [10, 1000]])
def test_a_document_with_most_of_the_tokens_trains(lengths):
    train, heldout = split_documents(id_documents(lengths))
    assert (train.num_tokens, heldout.num_tokens) == (1000, 10)


def test_one_document_has_no_heldout_part_and_the_caller_sees_it():
    documents = id_documents([50])
    train, heldout = split_documents(documents)
    assert (len(train), len(heldout), heldout.num_tokens) == (1, 0, 0)
    assert list(heldout_batches(documents, global_batch=2, seq_len=8)) == []
    with pytest.raises(ValueError, match="split 'heldout' of arrays is empty; .*one document"):
        batches(documents, global_batch=2, seq_len=8, split="heldout")
    assert len(split_documents(id_documents(), holdout=0)[1]) == 0


@pytest.mark.parametrize("global_batch", [1, 4, 64])
def test_a_pass_over_heldout_counts_each_token_once_whatever_the_batch(global_batch):
    documents = id_documents()
    passed = list(heldout_batches(documents, global_batch=global_batch, seq_len=16, split="all"))
    assert all(batch["tokens"].shape == (global_batch, 16) for batch in passed)
    targets = np.concatenate([batch["targets"][batch["weights"] == 1] for batch in passed])
    assert sorted(targets.tolist()) == sorted(
        1000 * d + 1 + i for d, n in enumerate(LENGTHS) for i in range(1, n)
    )


def test_max_rows_stops_after_that_many_rows(devices):
    plan = make_plan(devices, {"data": 8}, PartitionSpec("data"))
    documents = id_documents()
    passed = list(heldout_batches(documents, plan, global_batch=8, seq_len=16, split="all",
                                  max_rows=9))  # fmt: skip
    rows = np.concatenate([np.asarray(batch["tokens"]) for batch in passed])
    assert rows.shape == (16, 16) and not rows[9:].any()
    expected = pack_rows(documents, np.arange(9), seq_len=16, seed=None)
    np.testing.assert_array_equal(rows[:9], expected["tokens"])
    with pytest.raises(ValueError, match="max_rows=0 evaluates nothing"):
        heldout_batches(documents, global_batch=8, seq_len=16, max_rows=0)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options,message",
    [
        ({"start": -1}, "start=-1"),
        ({"steps": -2}, "steps=-2"),
        ({"global_batch": 0}, "global_batch 0 holds nothing"),
        ({"seq_len": -4}, "seq_len -4 holds nothing"),
        ({"holdout": 1.0}, r"holdout=1\.0 is not a share"),
        ({"split": "test"}, "split 'test' is unknown; it is one of train, heldout, all"),
        ({"vocab_size": 5000}, r"token id 5001 in document 1 of array5 is outside vocab_size 5000"),
    ],
)
def test_bad_settings_are_refused_before_the_first_batch(options, message):
    with pytest.raises(ValueError, match=message):
        batches(id_documents(), **{"global_batch": 2, "seq_len": 4, **options})


def test_ids_are_checked_in_the_documents_of_a_part_only():
    documents = id_documents()
    with pytest.raises(ValueError, match="outside vocab_size 2000"):
        batches(documents, global_batch=2, seq_len=4, vocab_size=2000, split="all")
    small = documents.select(documents.file < 2)
    batch = next(batches(small, global_batch=2, seq_len=4, vocab_size=2000, split="all"))
    assert batch["tokens"].max() < 2000


# --- the package ---------------------------------------------------------------------------------


def test_importing_loads_no_reader_and_starts_no_backend():
    script = (
        "import sys, jaxpar.data, jax; print([m for m in ('grain', 'tokenizers') "
        "if m in sys.modules]); jax.config.update('jax_platforms', 'cpu'); "
        "jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices()))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:2] == ["[]", "3"]


@pytest.mark.parametrize(
    "name", ["permutation", "documents", "tokenizer", "sources", "packing", "batches"]
)
def test_the_examples_in_the_docstrings_run(name):
    results = doctest.testmod(importlib.import_module(f"jaxpar.data.{name}"))
    assert results.failed == 0 and results.attempted > 0
