"""What hides a collective: schedules written by hand, and those that XLA made for GPUs."""

import pytest
from hlo_samples.handmade import MESH, module

from jaxpar.cluster.hlo_overlap import Exposure, by_phase, overlaps, scope

DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
FLOPS, BYTES = 2 * 32 * 32 * 8, 32 * 32 * 4
GROUPS = "replica_groups=[2,4]<=[8]"
SHAPE, STATE = "f32[32,8]", "(s32[], f32[32,8])"
WRAPPED = (
    f"%wrapped (p: {SHAPE}) -> f32[8,8] {{\n  %p = {SHAPE} parameter(0)\n"
    f"  ROOT %r = f32[8,8] reduce-scatter(%p), {GROUPS}\n}}\n"
)


def found(entry: str, before: str = "", **settings):
    return overlaps(module(entry, before), MESH, **settings)


def one(entry: str, before: str = "", **settings):
    (item,) = found(entry, before, **settings)
    return item


def around(middle: str, before: str = "", **settings):
    """The overlap of an all-reduce with these lines between its start and its done."""
    return one(
        f"  %s = {SHAPE} all-reduce-start(%x), {GROUPS}, to_apply=%sum\n{middle}\n"
        f"  ROOT %d = {SHAPE} all-reduce-done(%s)",
        before,
        **settings,
    )


def hidden(item) -> tuple:
    return item.exposed, item.flops_between, item.bytes_between, item.between


PERMUTE = "collective-permute-start(%x), source_target_pairs={{0,1}}"


@pytest.mark.parametrize(
    "start, done",
    [
        (f"{SHAPE} all-reduce-start(%x), {GROUPS}, to_apply=%sum", "all-reduce-done(%s)"),
        (f"({SHAPE}, f32[128,8]) all-gather-start(%x), {GROUPS}", "all-gather-done(%s)"),
        (f"(({SHAPE}), f32[8,8]) reduce-scatter-start(%x), {GROUPS}", "reduce-scatter-done(%s)"),
        (f"({SHAPE}, {SHAPE}, u32[], u32[]) {PERMUTE}", "collective-permute-done(%s)"),
        (f"(({SHAPE}), {SHAPE}) all-to-all-start(%x), {GROUPS}", "all-to-all-done(%s)"),
        (f"(({SHAPE}), f32[8,8], u32[]) async-start(%x), calls=%wrapped",
         "async-done(%s), calls=%wrapped"),
        (f"({SHAPE}, u32[], token[]) send(%x, %x), source_target_pairs={{{{0,1}}}}",
         "send-done(%s)"),
    ],
)  # fmt: skip
def test_a_product_between_start_and_done_hides_every_form_of_collective(start, done):
    item = one(f"  %s = {start}\n  %y = f32[32,32] {DOT}\n  ROOT %d = {SHAPE} {done}", WRAPPED)
    assert hidden(item) == (False, FLOPS, BYTES, ("y",))
    assert (item.axes, item.count) == (("tensor",), 1)


def test_an_update_stands_between_the_start_and_the_done_of_its_pair():
    shape = f"(({SHAPE}), f32[8,8], u32[])"
    lines = [
        f"  %s = {shape} async-start(%x), calls=%wrapped",
        f"  %u = {shape} async-update(%s), calls=%wrapped",
        f"  %y = f32[32,32] {DOT}",
        "  ROOT %d = f32[8,8] async-done(%u), calls=%wrapped",
    ]
    assert hidden(one("\n".join(lines), WRAPPED)) == (False, FLOPS, BYTES, ("y",))


@pytest.mark.parametrize(
    "line",
    [
        f"%d = {SHAPE} all-reduce(%x), {GROUPS}, to_apply=%sum\n  %y = f32[32,32] {DOT}",
        f"%s = {SHAPE} all-reduce-start(%x), {GROUPS}, to_apply=%sum, "
        f'backend_config={{"collective_backend_config":{{"is_sync":true}}}}\n'
        f"  %y = f32[32,32] {DOT}\n  %d = {SHAPE} all-reduce-done(%s)",
    ],
)
def test_synchronous_collectives_are_listed_and_exposed(line):
    item = one(f"  {line}\n  ROOT %out = {SHAPE} copy(%d)")
    assert (item.op, item.bytes) == ("all-reduce", 1024)
    assert hidden(item) == (True, 0, 0, ())


def test_an_asynchronous_wrapper_may_be_synchronous_by_its_settings():
    entry = (
        f"  %s = (({SHAPE}), f32[8,8]) async-start(%x), calls=%wrapped, "
        'backend_config={"collective_backend_config":{"is_sync": true}}\n'
        f"  %y = f32[32,32] {DOT}\n  ROOT %d = f32[8,8] async-done(%s), calls=%wrapped"
    )
    assert one(entry, WRAPPED).exposed


def test_several_in_flight_are_each_hidden_by_what_is_between_their_own_start_and_done():
    first, second = found(
        f"  %s = ({SHAPE}, {SHAPE}) {PERMUTE}\n"
        f"  %y = f32[32,32] {DOT}\n"
        f"  %t = {SHAPE} all-reduce-start(%x), {GROUPS}, to_apply=%sum\n"
        f"  %z = f32[32,32] {DOT}\n"
        f"  %e = {SHAPE} collective-permute-done(%s)\n"
        f"  ROOT %d = {SHAPE} all-reduce-done(%t)"
    )
    assert (first.flops_between, set(first.between)) == (2 * FLOPS, {"y", "z"})
    assert (second.flops_between, second.between) == (FLOPS, ("z",))


def test_collectives_and_operations_without_work_hide_nothing():
    _, item, _ = found(
        f"  %s = ({SHAPE}, {SHAPE}) {PERMUTE}\n"
        f"  %t = {SHAPE} all-reduce-start(%x), {GROUPS}, to_apply=%sum\n"
        f"  %b = {SHAPE} bitcast(%x)\n  %k = s32[] constant(1)\n  %p = u32[] partition-id()\n"
        f"  %u = ({SHAPE}, s32[]) tuple(%b, %k)\n"
        f"  %r = {SHAPE} all-reduce(%x), {GROUPS}, to_apply=%sum\n"
        f"  %e = {SHAPE} collective-permute-done(%s)\n"
        f"  ROOT %d = {SHAPE} all-reduce-done(%t)"
    )
    assert item.op == "all-reduce" and hidden(item) == (True, 0, 0, ())


FUSED = (
    f"%fused (p: {SHAPE}) -> f32[32,32] {{\n  %x = {SHAPE} parameter(0)\n"
    f"  %q = {SHAPE} negate(%x)\n  ROOT %y = f32[32,32] {DOT}\n}}\n"
)
LIGHT = (
    f"%light (p: {SHAPE}) -> {SHAPE} {{\n  %p = {SHAPE} parameter(0)\n"
    f"  %q = {SHAPE} exponential(%p)\n  ROOT %y = {SHAPE} negate(%q)\n}}\n"
)


def test_a_fusion_counts_its_products_and_what_it_writes():
    item = around("  %f = f32[32,32] fusion(%x), kind=kOutput, calls=%fused", FUSED)
    assert hidden(item) == (False, FLOPS, BYTES, ("f",))


def test_memory_bound_work_leaves_a_collective_exposed_and_its_bytes_are_told():
    item = around(f"  %f = {SHAPE} fusion(%x), kind=kLoop, calls=%light", LIGHT)
    assert hidden(item) == (True, 0, 1024, ("f",))


def test_an_update_in_place_counts_what_it_writes():
    update = (
        f"%update (p: f32[100,32,8], q: {SHAPE}) -> f32[100,32,8] {{\n"
        f"  %p = f32[100,32,8] parameter(0)\n  %q = {SHAPE} parameter(1)\n"
        "  %one = f32[1,32,8] bitcast(%q)\n  %k = s32[] constant(0)\n"
        "  ROOT %u = f32[100,32,8] dynamic-update-slice(%p, %one, %k, %k, %k)\n}\n"
    )
    item = around(
        "  %big = f32[100,32,8] parameter(1)\n"
        "  %f = f32[100,32,8] fusion(%big, %x), kind=kLoop, calls=%update",
        update,
    )
    assert item.bytes_between == 1024


def test_scratch_space_of_library_calls_is_not_written_data():
    numbers = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}'
    item = around(
        '  %y = (f32[32,32], s8[33554432]) custom-call(%x, %x), custom_call_target="__cublas$gemm"'
        f', backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{numbers}}}}}'
    )
    assert hidden(item) == (False, FLOPS, BYTES, ("y",))


def loop(body: str, trips: int | None = 5, start: str = "%x", name: str = "w") -> tuple[str, str]:
    """A line that runs a loop and the loop's computations; `body` makes %next from %v and %i."""
    config = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    unpack = (
        f"  %p = {STATE} parameter(0)\n  %i = s32[] get-tuple-element(%p), index=0\n"
        f"  %v = {SHAPE} get-tuple-element(%p), index=1\n"
    )
    before = (
        f"%{name}_body (p: {STATE}) -> {STATE} {{\n{unpack}{body}\n"
        f"  ROOT %out = {STATE} tuple(%i, %next)\n}}\n"
        f"%{name}_cond (p: {STATE}) -> pred[] {{\n{unpack}"
        "  ROOT %go = pred[] custom-call(%i)\n}\n"
    )
    line = (
        f"  %{name}_k = s32[] constant(0)\n  %{name}_t = {STATE} tuple(%{name}_k, {start})\n"
        f"  %{name} = {STATE} while(%{name}_t), condition=%{name}_cond, body=%{name}_body{config}"
    )
    return line, before


BODY = f"  %y = f32[32,32] {DOT.replace('%x', '%v')}\n  %next = {SHAPE} slice(%y)"


def test_a_whole_loop_in_between_counts_with_its_trips():
    item = around(*loop(BODY))
    tests = 6  # the condition runs once more, and its result has one byte
    assert hidden(item) == (False, 5 * FLOPS, 5 * (BYTES + 1024) + tests, ("w",))


def test_nested_loops_in_between_multiply():
    inner, below = loop(BODY, 3, "%v", "inner")
    outer, around_it = loop(f"{inner}\n  %next = {SHAPE} get-tuple-element(%inner), index=1", 4)
    assert around(outer, below + around_it).flops_between == 12 * FLOPS


def test_a_loop_of_unknown_trips_hides_by_an_amount_that_is_not_known():
    line, before = loop(BODY, None)
    item = around(line, before)
    assert hidden(item) == (False, None, None, ("w",))
    assert around(line, before, trip_counts={"w": 2}).flops_between == 2 * FLOPS


def test_an_unknown_loop_without_products_leaves_a_collective_exposed():
    item = around(*loop(f"  %next = {SHAPE} negate(%v)", None))
    assert (item.exposed, item.flops_between, item.bytes_between) == (True, 0, None)


def test_branches_in_between_count_with_their_share():
    line = (
        "  %k = pred[] constant(true)\n"
        "  %c = f32[32,32] conditional(%k, %x, %x), true_computation=%fused, "
        "false_computation=%fused"
    )
    for share, flops in [(0.5, FLOPS), (lambda _, branch: (0.25, 0)[branch], FLOPS // 4)]:
        item = around(line, FUSED, branch_share=share)
        assert (item.flops_between, item.between) == (flops, ("c",))


def test_the_largest_work_in_between_is_named_first():
    lines = [f"  %f{i} = {SHAPE} fusion(%x), kind=kLoop, calls=%light" for i in range(6)]
    lines.insert(3, f"  %y = f32[32,32] {DOT}")
    assert around("\n".join(lines), LIGHT).between == ("y", "f5", "f4", "f3")


def test_a_program_that_is_not_scheduled_is_refused():
    text = module(f"  ROOT %y = {SHAPE} copy(%x)").replace("is_scheduled=true, ", "")
    with pytest.raises(ValueError, match="test is not scheduled; .*order of issue; give the text"):
        overlaps(text, MESH)


# Phases and sums


@pytest.mark.parametrize(
    "op_name, part",
    [
        ("jit(step)/shard_map/while/body/closed_call/F/while/body/closed_call/all_gather", "F"),
        ("jit(step)/shard_map/while/body/closed_call/head/transpose(head)/jvp()/psum", "head"),
        ("jit(step)/transpose(jvp(B))/psum", "B"),
        ("jit(step)/embed_back/embed/psum", "embed_back"),
        ("jit(F)/shard_map/ppermute", "step"),
        ("", "step"),
    ],
)
def test_the_scope_is_the_outermost_known_name(op_name, part):
    assert scope(op_name) == part


def test_what_has_no_name_belongs_where_the_loop_around_it_does():
    line, before = loop(f"  %next = {SHAPE} all-reduce(%v), {GROUPS}, to_apply=%sum")
    named = f'{line}, metadata={{op_name="jit(step)/B/while"}}\n'
    item = one(named + f"  ROOT %y = {SHAPE} get-tuple-element(%w), index=1", before)
    assert (item.phase, item.op_name) == ("B", "")


def test_phases_may_be_given():
    item = around("", phase_of=lambda visit: f"{visit.computation.name} {visit.count}")
    assert item.phase == "main 1"


def test_sums_tell_the_exposed_part_of_what_is_sent():
    exposed, loop_body = loop(f"  %next = {SHAPE} all-reduce(%v), {GROUPS}, to_apply=%sum", 3)
    items = found(
        f"{exposed}\n  %s = {SHAPE} all-reduce-start(%x), {GROUPS}, to_apply=%sum\n"
        f"  %y = f32[32,32] {DOT}\n  ROOT %d = {SHAPE} all-reduce-done(%s)",
        loop_body,
    )
    key = ("all-reduce", ("tensor",), "step")
    assert by_phase(items) == {key: Exposure(4, 3, 4 * 1024, 3 * 1024)}
    assert by_phase(items)[key].share == 0.75


def test_sums_over_unknown_loops_are_unknown():
    line, before = loop(f"  %next = {SHAPE} all-reduce(%v), {GROUPS}, to_apply=%sum", None)
    items = found(f"{line}\n  ROOT %y = {SHAPE} get-tuple-element(%w), index=1", before)
    (total,) = by_phase(items).values()
    assert total == Exposure(None, None, None, None) and total.share is None
