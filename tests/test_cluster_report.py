"""Reports, their text, JSON and differences, and the assertions of `jaxpar.testing`."""

import dataclasses
import json
from fractions import Fraction

import pytest

from jaxpar.cluster import live, report_text
from jaxpar.cluster.hlo import Flops, collectives, parse
from jaxpar.cluster.hlo_overlap import overlaps
from jaxpar.cluster.live_arrays import largest
from jaxpar.cluster.report import Array, Memory, Report, collective_rows
from jaxpar.cluster.target import Target
from jaxpar.testing import assert_collectives, assert_fits

TARGET = Target(gpu="h100", nodes=2, gpus_per_node=4)
AXES = {"data": 4, "tensor": 2}
USABLE = int(0.92 * 84_942_979_072)

TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[64]{0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %r = f32[64]{0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[64]{0}) tuple(%next, %r)
}

%condition (p: (s32[], f32[64])) -> pred[] {
  %p.1 = (s32[], f32[64]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %three), direction=LT
}

ENTRY %main (a: f32[64], b: f32[32,32]) -> (f32[64], f32[128,32]) {
  %a = f32[64]{0} parameter(0), metadata={op_name="a"}
  %b = f32[32,32]{1,0} parameter(1), metadata={op_name="b"}
  %zero = s32[] constant(0)
  %s = (f32[32,32]{1,0}, f32[128,32]{1,0}) all-gather-start(%b), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %c = f32[32,32]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = f32[128,32]{1,0} all-gather-done(%s)
  %start = (s32[], f32[64]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[64]{0}) while(%start), condition=%condition, body=%body, metadata={op_name="jit(f)/while"}
  %y = f32[64]{0} get-tuple-element(%loop), index=1
  %alone = f32[64]{0} all-reduce(%y), replica_groups=[8,1]<=[8], to_apply=%add
  ROOT %out = (f32[64]{0}, f32[128,32]{1,0}) tuple(%alone, %d)
}
"""  # noqa: E501


def report(peak=10, text=TEXT, target=TARGET, flops=None, numbers=tuple(range(8)), **more):
    program = parse(text)
    device = None if target.is_cpu else target.chip.memory_bytes
    made = Report(
        title="f",
        target=target,
        mesh_axes=AXES,
        memory=Memory(
            arguments=6, outputs=2, temporaries=peak - 7, aliased=1, peak=peak, device=device,
            arrays=(Array("argument", "a", "f32[64]", 256),),
        ),
        flops_by=flops or Flops(dots=2 * 32**3),
        collectives=collective_rows(collectives(program, AXES), target, numbers),
        overlap=tuple(overlaps(program, AXES)),
        warnings=("w " * 80,),
        trace_seconds=0.1,
        compile_seconds=1.23456,
        text=text,
    )  # fmt: skip
    return dataclasses.replace(made, **more)


def test_rows_multiply_loops_out_and_leave_out_what_has_no_partner():
    gather, reduce = report().collectives
    assert (gather.op, gather.axis, gather.count, gather.bytes) == ("all-gather", "data", 1, 16384)
    assert (gather.total_bytes, gather.wire_bytes) == (16384, 12288)
    assert (reduce.op, reduce.axis, reduce.count, reduce.bytes) == ("all-reduce", "tensor", 3, 256)
    assert (reduce.total_bytes, reduce.wire_bytes) == (768, 768)


def test_rows_say_which_groups_cross_nodes():
    assert [row.crosses_nodes for row in report().collectives] == [True, False]
    one_node = report(target=Target(gpu="h100"))
    assert [row.crosses_nodes for row in one_node.collectives] == [False, False]


def test_nodes_follow_the_devices_numbers_and_not_their_place_in_the_mesh():
    rows = report(numbers=(0, 4, 1, 5, 2, 6, 3, 7)).collectives
    assert [row.crosses_nodes for row in rows] == [False, True]


def test_json_is_exactly_the_object_of_the_docs():
    found = json.loads(json.dumps(report().to_json()))
    assert found == {
        "fits": True,
        "memory": {
            "arguments": 6,
            "outputs": 2,
            "temporaries": 3,
            "aliased": 1,
            "peak": 10,
            "device": 84_942_979_072,
        },
        "flops": 65536,
        "collectives": [
            dict(op="all-gather", axis="data", count=1, bytes=16384, total_bytes=16384,
                 crosses_nodes=True),
            dict(op="all-reduce", axis="tensor", count=3, bytes=256, total_bytes=768,
                 crosses_nodes=False),
        ],
        "overlap": [
            dict(op="all-gather", axis="data", phase="step", exposed=False, flops_between=65536),
            dict(op="all-reduce", axis="tensor", phase="step", exposed=True, flops_between=0),
            dict(op="all-reduce", axis="", phase="step", exposed=True, flops_between=0),
        ],
        "warnings": ["w " * 80],
        "compile_seconds": 1.235,
    }  # fmt: skip


def test_shares_of_branches_are_numbers_in_json():
    flops = Flops(dots=Fraction(1, 2))
    assert json.loads(json.dumps(report(flops=flops).to_json()))["flops"] == 0.5
    assert report(flops=Flops(dots=Fraction(4, 2))).flops == 2


def test_a_program_fits_up_to_92_percent_of_the_gpu():
    assert report(USABLE).fits is True and report(USABLE).memory.left == 0
    assert report(USABLE + 1).fits is False and report(USABLE + 1).memory.left == -1
    emulated = report(USABLE, target=Target(gpu="cpu"))
    assert emulated.fits is None and emulated.memory.left is None


def test_the_text_says_everything_within_100_columns():
    text = str(report(USABLE + 2**30))
    assert max(map(len, text.splitlines())) <= 100
    for words in ("8 x h100-80gb in 2 nodes of 4", "does not fit: 1.00 GiB too much",
                  "92 % of 79.11 GiB; the rest is for the CUDA context and NCCL", "65,536 FLOP",
                  "all-gather", "nodes", "inside", "compiled in 1.2 s", "warning: w"):  # fmt: skip
        assert words in text
    assert "it fits" in str(report()) and "fit" not in str(report(target=Target(gpu="cpu")))


def test_an_unknown_loop_leaves_sums_open_instead_of_wrong():
    unknown = report(
        text=TEXT.replace("s32[] constant(3)", 's32[] custom-call(), custom_call_target="n"'),
        flops=Flops(unknown_loops=("loop",)),
    )
    (reduce,) = (row for row in unknown.collectives if row.op == "all-reduce")
    assert (reduce.count, reduce.total_bytes, reduce.wire_bytes) == (None, None, None)
    assert unknown.flops is None
    text = str(unknown)
    assert "operations: not known" in text and "?" in text


def test_the_difference_of_a_report_to_itself_is_nothing():
    assert not report().diff(report())
    assert str(report().diff(report())) == "no number differs"


def test_a_difference_names_the_numbers_that_changed():
    other = report(
        peak=20,
        text=TEXT.replace("s32[] constant(3)", "s32[] constant(5)"),
        flops=Flops(dots=3 * 32**3),
    )
    diff = report().diff(other)
    assert diff and diff.memory == {"temporaries": (3, 13), "peak": (10, 20)}
    assert diff.flops == (2 * 32**3, 3 * 32**3)
    ((key, (before, after)),) = diff.collectives.items()
    assert key == ("all-reduce", "tensor") and (before.count, after.count) == (3, 5)
    assert diff.exposed == {("all-reduce", "tensor"): (768, 1280)}
    text = str(diff)
    for words in ("peak", "x 2.00", "3 x, 768 B", "5 x, 1.25 KiB", "exposed all-reduce"):
        assert words in text


def test_a_collective_that_only_one_has_differs_from_none():
    without = dataclasses.replace(report(), collectives=(), overlap=())
    assert set(without.diff(report()).collectives) == set(report().by_axis)
    assert set(report().diff(without).exposed) == {("all-reduce", "tensor")}


EXPECTED = {
    ("all-gather", "data"): dict(count=1, bytes=16384),
    ("all-reduce", "tensor"): dict(count=3, bytes=768),
}


def test_expected_collectives_pass():
    assert_collectives(report(), EXPECTED, no_others=True)
    assert_collectives(report(), {("all-reduce", "tensor"): dict(count=3)})
    assert_collectives(report(), {("all-reduce", "data"): dict(count=0)})


def test_every_wrong_collective_is_named_with_both_numbers():
    wrong = {
        ("all-gather", "data"): dict(count=2, bytes=16384),
        ("all-reduce", "tensor"): dict(bytes=1000),
        ("all-to-all", "data"): dict(count=1),
    }
    with pytest.raises(AssertionError) as error:
        assert_collectives(report(), wrong)
    assert str(error.value).splitlines()[1:] == [
        "all-gather over data: expected 2 executions, found 1 executions",
        "all-reduce over tensor: expected 1,000 bytes, found 768 bytes",
        "all-to-all over data: expected 1 executions, found none",
    ]


def test_collectives_that_are_not_expected_are_an_error_when_asked_for():
    with pytest.raises(AssertionError, match="all-reduce over tensor: expected none, found 3 exec"):
        assert_collectives(report(), {("all-gather", "data"): dict(count=1)}, no_others=True)


def test_a_misspelt_number_is_an_error_of_the_test():
    with pytest.raises(ValueError, match="no number 'byte'; did you mean 'bytes'"):
        assert_collectives(report(), {("all-gather", "data"): dict(byte=1)})


def test_assert_fits_compares_with_the_gpu_or_with_a_number():
    assert_fits(report(USABLE))
    assert_fits(report(2**30), gib=1)
    with pytest.raises(AssertionError, match=r"needs 2.000 GiB of each device and may take 1.000"):
        assert_fits(report(2**31), gib=1)
    with pytest.raises(AssertionError, match=r"may take 72.781, 1.000 less"):
        assert_fits(report(USABLE + 2**30))
    with pytest.raises(ValueError, match="no memory of its own; give gib"):
        assert_fits(report(target=Target(gpu="cpu")))


BUFFERS = """BufferAssignment:
allocation 0: size 100, parameter 0, shape |f32[25]| at ShapeIndex {}:
 value: <1 a @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 300, page 0, preallocated-temp:
 value: <2 early @0> (size=200,offset=0): f32[50]{0}
 value: <3 late{1} @0> (size=120,offset=0): f32[30]{0}
 value: <4 d @0> (size=100,offset=200): f32[25]{0}
 value: <5 p{0} (phi) @0> (size=120,offset=0): f32[30]{0}
 value: <6 inside @0> (size=60,offset=120): f32[15]{0}

Total bytes used: 400
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:a
    1:early
  BufferLiveRange:
    a{}:0-9
    early{}:1-3
    late{1}:4-8
    p{0}:5-8
    inside{}:4-5
    d{}:{d}
  Live ranges at 3 (peak):
    early{}: 200 bytes
"""


def test_the_peak_is_the_moment_with_the_most_bytes_each_place_counted_once():
    together = live.at_peak(BUFFERS, RANGES.replace("{d}", "3-9", 1))
    assert [(v.name, v.bytes) for v in together] == [("early{}", 200), ("d{}", 100)]
    later = live.at_peak(BUFFERS, RANGES.replace("{d}", "4-9", 1))
    assert [(v.name, v.bytes) for v in later] == [("late{1}", 120), ("d{}", 100), ("inside{}", 60)]
    assert later[0].shape == "f32[30]"


def test_without_a_dump_no_array_is_named(tmp_path):
    assert live.live_values(tmp_path) == [] and live.at_peak("", "") == []


def test_arrays_are_named_after_their_place_in_the_program():
    program = parse(TEXT)
    values = [live.Value(name, "f32[64]", size, 0) for name, size in
              (("loop{1}", 3), ("p{1}", 2), ("c{}", 1), ("s{1}", 9))]  # fmt: skip
    found = {(a.kind, a.name, a.bytes) for a in largest(program, values)}
    assert found == {
        ("argument", "a", 256), ("argument", "b", 4096), ("temporary", "jit(f)/while", 3),
        ("temporary", "jit(f)/while", 2), ("temporary", "c", 1), ("temporary", "b", 9),
    }  # fmt: skip


def test_long_lines_are_cut_and_numbers_have_units():
    assert report_text.cut("x" * 200).endswith("...") and len(report_text.cut("x" * 200)) == 100
    assert report_text.size(1536) == "1.50 KiB" and report_text.size(0) == "0 B"
    assert report_text.times(Fraction(5, 2) + 0.0) == "2.5"
