"""Warm-up, steady and cool-down: from the table, and in programs that XLA compiled."""

import collections
import pathlib

import pytest
from hlo_samples import overlapped
from hlo_samples.handmade import MESH, module

import jaxpar as jp
from compiled import compiled
from jaxpar.cluster.hlo_overlap import by_phase, overlaps
from jaxpar.cluster.phases import pipeline_phases, segment_phases
from jaxpar.pipeline import ticks
from jaxpar.pipeline.table import lower

W, S, C = "warm-up", "steady", "cool-down"


@pytest.mark.parametrize(
    "schedule, stages, microbatches, chunks",
    [("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1), ("gpipe", 4, 8, 1), ("interleaved", 4, 8, 2)],
)
def test_warm_up_has_only_forwards_and_cool_down_only_backwards(
    schedule, stages, microbatches, chunks
):
    table = lower(schedule, stages, microbatches, chunks)
    phases = segment_phases(table)
    assert phases == sorted(phases, key=[W, S, C].index) and {W, C} <= set(phases)
    for phase, segment in zip(phases, ticks.segments(table), strict=True):
        works = segment.forward, segment.backward
        assert works == {W: (True, False), S: (True, True), C: (False, True)}[phase]


def phase_of(op_name: str, layout: jp.Layout) -> str:
    text = module(
        "  ROOT %y = f32[32,8] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%sum, "
        f'metadata={{op_name="{op_name}"}}'
    )
    (item,) = overlaps(text, MESH, phase_of=pipeline_phases(layout))
    return item.phase


LAYOUT = jp.Layout(pipe=4, microbatches=8, data=2)


@pytest.mark.parametrize(
    "op_name, phase",
    [
        ("jit(step)/shard_map/segment 0/while/body/closed_call/ppermute", W),
        ("jit(step)/shard_map/segment 0/while/body/closed_call/F/while/body/psum", f"{W} F"),
        ("jit(step)/shard_map/segment 2/while/body/closed_call/head/jvp()/psum", f"{S} head"),
        ("jit(step)/shard_map/segment 3/while", S),
        ("jit(step)/shard_map/segment 4/while/body/closed_call/B/while/body/psum", f"{C} B"),
        ("jit(step)/shard_map/all_gather", "step"),
        ("jit(step)/shard_map/embed/psum", "embed"),
    ],
)
def test_an_instruction_has_the_phase_of_its_segment_and_its_scope(op_name, phase):
    assert phase_of(op_name, LAYOUT) == phase


def test_a_program_of_another_layout_is_refused():
    rule = "is of segment 5, but schedule '1f1b' with pipe=4 and microbatches=8 has the segments 0"
    with pytest.raises(ValueError, match=f"{rule} to 4; give the layout"):
        phase_of("jit(step)/shard_map/segment 5/while", LAYOUT)


@pytest.mark.parametrize("version", ["jax0_10", "jax0_12"])
def test_segments_are_found_in_gpu_programs_of_both_versions(version):
    path = pathlib.Path(overlapped.__file__).parent / f"gpu_{version}_overlapped.txt"
    found = overlaps(path.read_text(), overlapped.MESH_AXES, phase_of=pipeline_phases(LAYOUT))
    assert [item.phase for item in found] == [W, W, "step"]


@pytest.mark.parametrize(
    "layout",
    [
        dict(pipe=4, data=2, microbatches=8),
        dict(pipe=2, data=2, tensor=2, schedule="interleaved", chunks=2, microbatches=4),
    ],
    ids=["1f1b", "interleaved"],
)
def test_each_phase_of_a_compiled_pipeline_has_the_exchanges_of_its_ticks(layout):
    layout = jp.Layout(precision="fp32", **layout)
    program = compiled("llama", layout)
    found = by_phase(overlaps(program.text, layout.axis_sizes, phase_of=pipeline_phases(layout)))
    table = lower(layout.schedule, layout.pipe, layout.microbatches, layout.chunks)
    expected = collections.Counter()
    for phase, segment in zip(segment_phases(table), ticks.segments(table), strict=True):
        wires = len(segment.sends) + len(segment.receives)
        expected[phase] += wires * (segment.stop - segment.start)
    counts = {p: e.count for (op, _, p), e in found.items() if op == "collective-permute"}
    assert counts == dict(expected)
    parts = {phase for _, _, phase in found}
    assert {f"{W} embed", f"{S} head", f"{C} embed_back", "step"} <= parts
