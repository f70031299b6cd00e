"""Values followed across computations: from starts to dones, and into loops that change nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hlo_samples import programs
from hlo_samples.handmade import MESH, module
from hlo_samples.programs import MESH_AXES
from jax import lax

from jaxpar.cluster import hlo
from jaxpar.cluster.hlo_overlap import overlaps
from jaxpar.cluster.hlo_warnings import find
from jaxpar.costs import Transfer

OVER = "replica_groups=[2,4]<=[8]"
SHAPE = "f32[32,8]"
DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
FLOPS = 2 * 32 * 32 * 8
PERMUTE = "collective-permute-start(%x), source_target_pairs={{0,1}}"


def found(entry: str, before: str = "") -> list:
    return overlaps(module(entry, before), MESH)


def told(text: str, axes=MESH, expected=None) -> list[str]:
    return find(text, hlo.collectives(text, axes), expected=expected)


def told_of(entry: str, before: str = "", expected=None) -> list[str]:
    return told(module(entry, before), expected=expected)


def row(op: str, size: int, count: int = 1) -> Transfer:
    return Transfer("x", op, ("tensor",), count, size, 4)


@pytest.fixture(scope="module")
def mesh():
    return programs.make_mesh(jax.devices("cpu"))


# Starts and dones that are not in one computation


def carried(body: str, entry: str, trips: str = "5") -> list:
    """A loop that carries a permute's tuple, from %first in the entry."""
    state = f"(s32[], ({SHAPE}, {SHAPE}), {SHAPE})"
    before = (
        f"%body (p: {state}) -> {state} {{\n  %p = {state} parameter(0)\n"
        "  %i = s32[] get-tuple-element(%p), index=0\n"
        f"  %flying = ({SHAPE}, {SHAPE}) get-tuple-element(%p), index=1\n"
        f"  %x = {SHAPE} get-tuple-element(%p), index=2\n{body}\n}}\n"
        f"%cond (p: {state}) -> pred[] {{\n  %p = {state} parameter(0)\n"
        "  ROOT %go = pred[] custom-call(%p)\n}\n"
    )
    loop = f'body=%body, condition=%cond, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    text = entry.replace("LOOP", f"{state} while(%t), {loop}").replace("STATE", state)
    return found(text, before)


def test_a_start_in_one_iteration_with_its_done_in_the_next_is_hidden_by_both():
    body = (
        f"  %a = f32[32,32] {DOT}\n"
        f"  %d = {SHAPE} collective-permute-done(%flying)\n"
        f"  %b = f32[32,32] {DOT}\n"
        f"  %s = ({SHAPE}, {SHAPE}) {PERMUTE}\n"
        f"  %c = f32[32,32] {DOT}\n  %e = f32[32,32] {DOT}\n"
        f"  ROOT %out = (s32[], ({SHAPE}, {SHAPE}), {SHAPE}) tuple(%i, %s, %d)"
    )
    entry = (
        f"  %first = ({SHAPE}, {SHAPE}) {PERMUTE}\n  %k = s32[] constant(0)\n"
        f"  %z = f32[32,32] {DOT}\n"
        "  %t = STATE tuple(%k, %first, %x)\n  %w = LOOP\n"
        f"  %last = ({SHAPE}, {SHAPE}) get-tuple-element(%w), index=1\n"
        f"  ROOT %y = {SHAPE} collective-permute-done(%last)"
    )
    first, inside = carried(body, entry)
    assert (inside.name, inside.count) == ("s", 5)
    assert (inside.flops_between, set(inside.between)) == (3 * FLOPS, {"a", "c", "e"})
    assert (first.name, first.flops_between) == ("first", 2 * FLOPS)  # z, and a in the loop
    assert set(first.between) == {"z", "a"}


def test_a_start_that_leaves_its_loop_is_hidden_until_the_done_after_it():
    body = (
        f"  %s = ({SHAPE}, {SHAPE}) {PERMUTE}\n  %c = f32[32,32] {DOT}\n"
        f"  ROOT %out = (s32[], ({SHAPE}, {SHAPE}), {SHAPE}) tuple(%i, %s, %x)"
    )
    entry = (
        f"  %k = s32[] constant(0)\n  %none = ({SHAPE}, {SHAPE}) custom-call()\n"
        "  %t = STATE tuple(%k, %none, %x)\n  %w = LOOP\n"
        f"  %z = f32[32,32] {DOT}\n"
        f"  %last = ({SHAPE}, {SHAPE}) get-tuple-element(%w), index=1\n"
        f"  ROOT %y = {SHAPE} collective-permute-done(%last)"
    )
    (item,) = carried(body, entry, "1")
    assert (item.flops_between, set(item.between)) == (2 * FLOPS, {"c", "z"})


def test_a_start_that_a_loop_passes_on_is_hidden_by_the_whole_loop():
    body = (
        f"  %c = f32[32,32] {DOT}\n"
        f"  ROOT %out = (s32[], ({SHAPE}, {SHAPE}), {SHAPE}) tuple(%i, %flying, %x)"
    )
    entry = (
        f"  %first = ({SHAPE}, {SHAPE}) {PERMUTE}\n  %k = s32[] constant(0)\n"
        "  %t = STATE tuple(%k, %first, %x)\n  %w = LOOP\n"
        f"  %last = ({SHAPE}, {SHAPE}) get-tuple-element(%w), index=1\n"
        f"  ROOT %y = {SHAPE} collective-permute-done(%last)"
    )
    (item,) = carried(body, entry)
    assert (item.flops_between, item.between) == (5 * FLOPS, ("w",))


def test_a_done_is_found_through_tuples_bitcasts_and_copies():
    pair = f"({SHAPE}, {SHAPE})"
    (item,) = found(
        f"  %s = {pair} {PERMUTE}\n  %n = s32[] constant(1)\n  %c = {pair} copy(%s)\n"
        f"  %t = (s32[], {pair}) tuple(%n, %c)\n  %y = f32[32,32] {DOT}\n"
        f"  %b = (s32[], {pair}) opt-barrier(%t)\n"
        f"  %other = s32[] get-tuple-element(%b), index=0\n"
        f"  %g = {pair} get-tuple-element(%b), index=1\n  %h = {pair} bitcast(%g)\n"
        f"  ROOT %d = {SHAPE} collective-permute-done(%h)"
    )
    assert (item.exposed, item.flops_between) == (False, FLOPS)


def test_a_start_without_a_done_counts_as_exposed():
    (item,) = found(f"  %s = ({SHAPE}, {SHAPE}) {PERMUTE}\n  ROOT %y = f32[32,32] {DOT}")
    assert (item.exposed, item.flops_between, item.between) == (True, 0, ())


# Loops that do not change what a collective in them reads


def in_loop(body: str, trips: int = 5, root: str = "%i, %r, %same") -> tuple[str, str]:
    state = "(s32[], f32[32,8], f32[32,8])"
    before = (
        f"%body (p: {state}) -> {state} {{\n  %p = {state} parameter(0)\n"
        "  %i = s32[] get-tuple-element(%p), index=0\n"
        "  %v = f32[32,8] get-tuple-element(%p), index=1\n"
        "  %same = f32[32,8] get-tuple-element(%p), index=2\n"
        f"{body}\n  ROOT %out = {state} tuple({root})\n}}\n"
        f"%cond (p: {state}) -> pred[] {{\n  %p = {state} parameter(0)\n"
        "  ROOT %go = pred[] custom-call(%p)\n}\n"
        "%twice (p: f32[32,8]) -> f32[32,8] {\n  %p = f32[32,8] parameter(0)\n"
        "  ROOT %q = f32[32,8] add(%p, %p)\n}\n"
        "%sums (p: f32[32,8]) -> f32[32,8] {\n  %p = f32[32,8] parameter(0)\n"
        f"  ROOT %q = f32[32,8] all-reduce(%p), {OVER}, to_apply=%sum\n}}\n"
    )
    entry = (
        f"  %k = s32[] constant(0)\n  %t = {state} tuple(%k, %x, %x)\n"
        f"  %w = {state} while(%t), condition=%cond, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}\n'
        "  ROOT %y = f32[32,8] get-tuple-element(%w), index=1"
    )
    return entry, before


SUM = f"all-reduce(%a), {OVER}, to_apply=%sum"
PAIR = (
    "  %a = f32[32,8] copy(%same)\n"
    f"  %s = f32[32,8] all-reduce-start(%a), {OVER}, to_apply=%sum\n"
    "  %r = f32[32,8] all-reduce-done(%s)"
)


@pytest.mark.parametrize(
    "body",
    [
        f"  %a = f32[32,8] bitcast(%same)\n  %r = f32[32,8] {SUM}",
        f"  %a = f32[32,8] fusion(%same), kind=kLoop, calls=%twice\n  %r = f32[32,8] {SUM}",
        f"  %z = f32[32,8] constant(1)\n  %a = f32[32,8] add(%same, %z)\n  %r = f32[32,8] {SUM}",
        PAIR,
        "  %r = f32[32,8] call(%same), to_apply=%sums",
        "  %k = pred[] custom-call(%i)\n  %r = f32[32,8] conditional(%k, %same, %v), "
        "true_computation=%sums, false_computation=%twice",
    ],
    ids=["bitcast", "fusion", "constant", "async", "call", "branch"],
)
def test_a_collective_in_a_loop_that_reads_nothing_the_loop_changes_is_told(body):
    (text,) = told_of(*in_loop(body))
    assert text.startswith("all-reduce over tensor of 1,024 bytes of f32, 5 times a step (")
    assert text.endswith(
        "reads nothing that the loop around it (w, 5 iterations) changes; before the loop once "
        "would do"
    )


@pytest.mark.parametrize(
    "body, root",
    [
        (f"  %a = f32[32,8] add(%v, %same)\n  %r = f32[32,8] {SUM}", "%i, %r, %same"),
        (f"  %a = f32[32,8] add(%same, %i)\n  %r = f32[32,8] {SUM}", "%next, %r, %same"),
        (f"  %a = f32[32,8] copy(%same)\n  %r = f32[32,8] {SUM}", "%i, %r, %r"),
        (f"  %a = f32[32,8] copy(%same)\n  %r = f32[32,8] {SUM}", "%i, %same, %v"),
        (f"  %a = f32[32,8] rng(%same)\n  %r = f32[32,8] {SUM}", "%i, %r, %same"),
    ],
    ids=["carry", "counter", "changed", "swapped", "random"],
)
def test_a_collective_that_reads_what_the_loop_changes_is_not_told(body, root):
    step = "  %one = s32[] constant(1)\n  %next = s32[] add(%i, %one)\n"
    assert told_of(*in_loop(step + body, root=root)) == []


def test_a_loop_of_one_iteration_is_no_reason_to_move_a_collective():
    assert told_of(*in_loop(PAIR, trips=1)) == []


def test_a_collective_that_the_layout_asks_for_in_every_iteration_is_not_told():
    rows = partial(row, "all-reduce", 1024)
    assert told_of(*in_loop(PAIR), expected=[rows(count=5)]) == []
    assert told_of(*in_loop(PAIR), expected=[rows(count=2), rows(count=3)]) == []
    assert len(told_of(*in_loop(PAIR), expected=[rows(count=1)])) == 1


def test_a_loop_of_unknown_trips_is_told_and_not_taken_for_one():
    entry, before = in_loop(f"  %a = f32[32,8] copy(%v)\n  %r = f32[32,8] {SUM}")
    (text,) = told_of(entry.replace("known_trip_count", "other"), before)
    assert ", an unknown number of times a step " in text
    assert text.endswith(": the trip count of loop w is not known")


def test_a_sum_that_a_scan_repeats_is_told_in_a_compiled_program(mesh):
    # XLA itself takes such a sum out of a loop, but not out of a branch in it.
    def scanned(x, i, read):
        def body(carry, step):
            value = x if read == "x" else carry
            summed = lax.cond(step + i[0] > 1, lambda v: lax.psum(v, "tensor"), jnp.sin, value)
            return jnp.cos(carry + summed), None

        return lax.scan(body, x, jnp.arange(3))[0]

    texts = {
        read: programs.compile_manual(partial(scanned, read=read), mesh, jnp.float32)
        for read in ("x", "carry")
    }
    (text,) = told(texts["x"], MESH_AXES)
    assert text.startswith("all-reduce over tensor of 4,096 bytes of f32, 3 times a step (")
    assert ", 3 iterations) changes; before the loop once would do" in text
    assert told(texts["carry"], MESH_AXES) == []
