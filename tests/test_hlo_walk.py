"""Executions per step: loops, branches and calls, in HLO text written by hand."""

import pytest
from hlo_samples.handmade import MESH, module, one

from jaxpar.cluster import hlo

SUMS = "all-reduce(%v), replica_groups=[2,4]<=[8], to_apply=%sum"


def loop(
    name: str = "w",
    start: int = 0,
    step: str = "add(%i, %one)",
    until: str = "compare(%i, %n), direction=LT",
    bound: str = "%n = s32[] constant(5)",
    config: str = "",
) -> tuple[str, str]:
    """The entry lines and the computations of a loop with a sum in its body."""
    state = "(s32[], f32[32,8], s32[])"
    unpack = (
        f"  %p = {state} parameter(0)\n  %i = s32[] get-tuple-element(%p), index=0\n"
        "  %v = f32[32,8] get-tuple-element(%p), index=1\n"
        "  %m = s32[] get-tuple-element(%p), index=2\n  %one = s32[] constant(1)\n"
    )
    before = (
        f"%body (p: {state}) -> {state} {{\n{unpack}  %next = s32[] {step}\n"
        f"  %r = f32[32,8] {SUMS}\n  ROOT %out = {state} tuple(%next, %r, %m)\n}}\n"
        f"%cond (p: {state}) -> pred[] {{\n{unpack}  {bound}\n  ROOT %go = pred[] {until}\n}}\n"
    )
    entry = (
        f"  %start = s32[] constant({start})\n  %bound = s32[] constant(4)\n"
        "  %c = s32[] copy(%start)\n"
        f"  %t = {state} tuple(%c, %x, %bound)\n"
        f"  %{name} = {state} while(%t), condition=%cond, body=%body{config}\n"
        f"  ROOT %y = f32[32,8] get-tuple-element(%{name}), index=1"
    )
    return entry, before


@pytest.mark.parametrize(
    "settings, trips",
    [
        ({}, 5),
        ({"until": "compare(%i, %n), direction=LE"}, 6),
        ({"until": "compare(%n, %i), direction=GT"}, 5),
        ({"until": "compare(%i, %n), direction=NE"}, 5),
        ({"start": -3}, 8),
        ({"start": 9}, 0),
        ({"step": "add(%i, %m)"}, 2),
        ({"start": 9, "step": "subtract(%i, %one)",
          "until": "compare(%i, %n), direction=GE"}, 5),
        ({"bound": "%n = s32[] get-tuple-element(%p), index=2"}, 4),
        ({"config": ', backend_config={"known_trip_count":{"n":"12"}}'}, 12),
        ({"config": ', backend_config={"other":{},"known_trip_count": {"n": "12"}}'}, 12),
        ({"config": ', backend_config="{\\"known_trip_count\\":{\\"n\\":\\"12\\"}}"'}, 12),
    ],
)  # fmt: skip
def test_trip_counts_are_read_or_worked_out(settings, trips):
    found = one(*loop(**settings))
    assert (found.count, found.warning) == (trips, "")
    assert found.total_bytes == trips * 1024


def test_compare_and_step_inside_fusions_are_followed():
    fused = (
        "%less (a: s32[]) -> pred[] {\n  %a = s32[] parameter(0)\n  %k = s32[] constant(7)\n"
        "  ROOT %l = pred[] compare(%a, %k), direction=LT\n}\n"
        "%twice (a: s32[], b: s32[]) -> s32[] {\n  %b = s32[] parameter(1)\n"
        "  %a = s32[] parameter(0)\n  %k = s32[] add(%a, %b)\n  ROOT %l = s32[] add(%k, %b)\n}\n"
    )
    entry, before = loop(
        until="fusion(%i), kind=kLoop, calls=%less",
        step="fusion(%i, %one), kind=kLoop, calls=%twice",
    )
    assert one(entry, fused + before).count == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"bound": "%n = s32[] custom-call(%i)"},
        {"step": "custom-call(%i)"},
        {"until": "custom-call(%i)"},
        {"step": "add(%i, %i)"},
    ],
)
def test_an_unknown_trip_count_is_reported_and_never_one(settings):
    entry, before = loop(**settings)
    found = one(entry, before)
    assert (found.count, found.total_bytes, found.total_wire_bytes) == (None, None, None)
    assert found.warning == "the trip count of loop w is not known"
    assert hlo.by_axis([found]) == {("all-reduce", ("tensor",)): (None, None, None)}
    assert one(entry, before, trip_counts={"w": 3}).count == 3


def test_trip_counts_for_a_loop_that_is_not_there_are_refused():
    with pytest.raises(
        ValueError, match="trip_counts names 'v'; the program's loops are \\['w'\\]"
    ):
        one(*loop(), trip_counts={"v": 3})


def test_nested_loops_multiply():
    before = (
        "%inner (p: (f32[32,8])) -> (f32[32,8]) {\n  %p = (f32[32,8]) parameter(0)\n"
        "  %v = f32[32,8] get-tuple-element(%p), index=0\n"
        f"  %r = f32[32,8] {SUMS}\n  ROOT %o = (f32[32,8]) tuple(%r)\n}}\n"
        "%outer (p: (f32[32,8])) -> (f32[32,8]) {\n  %p = (f32[32,8]) parameter(0)\n"
        "  ROOT %o = (f32[32,8]) while(%p), condition=%cond, body=%inner, "
        'backend_config={"known_trip_count":{"n":"4"}}\n}\n'
        "%cond (p: (f32[32,8])) -> pred[] {\n  %p = (f32[32,8]) parameter(0)\n"
        "  %v = f32[32,8] get-tuple-element(%p), index=0\n"
        f"  %in_test = f32[32,8] {SUMS}\n  ROOT %g = pred[] custom-call(%in_test)\n}}\n"
    )
    entry = (
        "  %t = (f32[32,8]) tuple(%x)\n  ROOT %y = (f32[32,8]) while(%t), condition=%cond, "
        'body=%outer, backend_config={"known_trip_count":{"n":"3"}}'
    )
    found = hlo.collectives(module(entry, before), MESH)
    counts = sorted((item.computation, item.count) for item in found)
    # The condition runs once more than the body: 3 + 1 outside, 3 (4 + 1) inside.
    assert counts == [("cond", 4), ("cond", 15), ("inner", 12)]


BRANCHES = "".join(
    f"%{name} (v: f32[32,8]) -> f32[32,8] {{\n  %v = f32[32,8] parameter(0)\n"
    f"  ROOT %r = f32[32,8] {line}\n}}\n"
    for name, line in [("one", SUMS), ("none", "copy(%v)"), ("also", SUMS)]
)
SWITCH = (
    "  %k = s32[] constant(0)\n  ROOT %y = f32[32,8] conditional(%k, %x, %x, %x), "
    "branch_computations={%one, %none, %also}"
)
PREDICATE = (
    "  %k = pred[] constant(true)\n  ROOT %y = f32[32,8] conditional(%k, %x, %x), "
    "true_computation=%one, false_computation=%none"
)


def test_every_branch_counts_as_taken_unless_a_share_is_given():
    text = module(SWITCH, BRANCHES)
    for share, counts in [
        (1.0, [1, 1]),
        (0.25, [0.25, 0.25]),
        (lambda conditional, branch: {0: 0.75, 2: 0.0}.get(branch, 0.25), [0.75, 0]),
    ]:
        found = hlo.collectives(text, MESH, branch_share=share)
        assert [item.count for item in found] == counts
        assert all(item.in_conditional for item in found)


def test_a_conditional_with_a_predicate_has_two_branches_true_first():
    program = hlo.parse(module(PREDICATE, BRANCHES))
    root = program.computations["main"].root
    assert hlo.branches(root) == ("one", "none")
    assert one(PREDICATE, BRANCHES).in_conditional


def test_a_share_multiplies_the_trips_of_the_loop_around_it():
    entry, before = loop()
    body = SWITCH.replace("ROOT %y", "%r").replace("%x", "%v")
    before = BRANCHES + before.replace(f"  %r = f32[32,8] {SUMS}", body)
    found = hlo.collectives(module(entry, before), MESH, branch_share=0.4)
    assert [item.count for item in found] == [2, 2]


def test_calls_from_two_places_count_twice_and_combiners_are_not_followed():
    entry = (
        "  %a = f32[32,8] call(%x), to_apply=%one\n  %b = f32[32,8] fusion(%a), kind=kLoop, "
        "calls=%one\n  ROOT %y = f32[32,8] reduce(%b, %b), dimensions={}, to_apply=%one"
    )
    found = hlo.collectives(module(entry, BRANCHES), MESH)
    assert [item.count for item in found] == [1, 1]
    assert hlo.by_axis(found) == {("all-reduce", ("tensor",)): (2, 2048, 3072)}
