"""HLO text written by hand, one test per form that XLA prints."""

import itertools
import pathlib
import re

import numpy as np
import pytest
from hlo_samples.handmade import MESH, module, one

from jaxpar.cluster import hlo

# Text


def test_a_line_with_layouts_comments_quotes_and_nested_braces_is_read():
    text = module(
        "  %pair = (f32[32,8]{1,0:T(8,128)S(5)}, (bf16[<=4,2]{1,0}, /*index=2*/token[])) "
        'custom-call(f32[32,8]{1,0} %x, x), custom_call_target="f,(g{", '
        'sharding={{devices=[2,4]<=[8]}, {replicated}}, metadata={op_name="jit(f)/a, b=\\"}{" '
        'source_line=3}, backend_config={"a":{"n":"}"}}\n'
        "  ROOT %out = f32[32,8]{1,0} get-tuple-element(%pair), index=0\n"
        "  %after = s32[2,2]{1,0} constant({ { 1, 2 },\n { 3, 4 } })"
    )
    program = hlo.parse(text)
    main = program.computations["main"]
    pair = main.by_name["pair"]
    assert (program.name, program.entry, program.num_devices) == ("test", "main", 8)
    assert (pair.opcode, pair.operands) == ("custom-call", ("x", "x"))
    assert [leaf.dtype for leaf in pair.shape.leaves] == ["f32", "bf16", "token"]
    assert pair.shape.bytes == 32 * 8 * 4 + 4 * 2 * 2
    assert pair.attributes["custom_call_target"] == '"f,(g{"'
    assert pair.attributes["backend_config"] == '{"a":{"n":"}"}}'
    assert pair.op_name == 'jit(f)/a, b=\\"}{'
    assert main.root.name == "out"
    assert main.by_name["after"].literal == "{ { 1, 2 }, { 3, 4 } }"
    assert [user.name for user in main.users["pair"]] == ["out"]


def test_names_without_percent_and_bodies_without_root_are_read():
    program = hlo.parse(
        "HloModule m\n\nENTRY e {\n  p = s4[3]{0} parameter(0)\n  q = s4[3] copy(p)\n}"
    )
    entry = program.computations["e"]
    assert (entry.root.name, entry.root.operands, entry.root.shape.bytes) == ("q", ("p",), 2)
    assert program.num_devices is None


@pytest.mark.parametrize(
    "dtype, size",
    [("pred", 1), ("bf16", 2), ("f8e4m3fn", 1), ("c64", 8), ("s64", 8), ("u4", 0.5), ("f32", 4)],
)
def test_types_have_their_size(dtype, size):
    assert hlo.parse_shape(f"{dtype}[4,6]{{1,0}}").bytes == 24 * size


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation.*as_text"):
        hlo.parse("HloModule m\n")
    with pytest.raises(ValueError, match="cannot read the HLO line '%y is new'; expected name"):
        hlo.parse(module("  %y is new"))
    with pytest.raises(ValueError, match="type 'strange' has no known size"):
        _ = hlo.parse_shape("strange[2]").bytes


def test_instruction_lines_counts_every_computation():
    assert hlo.instruction_lines(module("  ROOT %y = f32[32,8] copy(%x)")) == 3 + 2


def test_the_readers_do_not_import_jax():
    for path in pathlib.Path(hlo.__file__).parent.glob("hlo*.py"):
        assert not re.search(r"^\s*(import|from) jax\b", path.read_text(), re.MULTILINE), path


# Groups


@pytest.mark.parametrize(
    "text, groups",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh[a=2,b=2] {a,b}", ((0, 1, 2, 3),)),
        ("@mesh<a=2,b=2> {b}", ((0, 1), (2, 3))),
        ("mesh[a=4] {}", ((0,), (1,), (2,), (3,))),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh[a=2,b=2], device_ids=([2,2]T(1,0)) {a}", ((0, 1), (2, 3))),
        ("mesh[a=2,b=2], device_ids=(3,1,0,2) {b}", ((3, 1), (0, 2))),
        ("@mesh<a=2,b=2>(devices=[2,2]<=[2,2]T(1,0)) {b}", ((0, 2), (1, 3))),
        ("@mesh<a=4>(devices=[4]3,1,0,2) {a:(1)2}", ((3, 0), (1, 2))),
    ],
)
def test_every_form_of_groups_is_read(text, groups):
    assert hlo.parse_groups(text, 4) == groups


def test_two_parts_of_one_axis_make_a_group():
    assert hlo.parse_groups("mesh[x=8] {x:(1)2,x:(4)2}", 8) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_groups_in_another_form_are_refused():
    with pytest.raises(ValueError, match="replica_groups='<0,1>' has no known form"):
        hlo.parse_groups("<0,1>", 2)


def test_groups_of_any_product_of_axes_map_back_to_these_axes():
    mesh = {"pipe": 2, "data": 3, "expert": 1, "tensor": 4}
    sizes, devices = list(mesh.values()), np.arange(24).reshape(2, 3, 1, 4)
    for count in range(5):
        for axes in itertools.combinations(range(4), count):
            rest = [axis for axis in range(4) if axis not in axes]
            size = int(np.prod([sizes[axis] for axis in axes], initial=1))
            groups = devices.transpose(*rest, *axes).reshape(-1, size)[::-1, ::-1]
            found = hlo.axes_of_groups(tuple(map(tuple, groups.tolist())), mesh)
            assert found == tuple(list(mesh)[axis] for axis in axes if sizes[axis] > 1)


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1), (2, 3), (4, 6), (5, 7)),
        ((0, 1, 2), (3,), (4, 5, 6), (7,)),
        ((0, 1, 2, 3),),
        ((0, 5), (1, 4), (2, 7), (3, 6)),
    ],
)
def test_groups_that_are_no_product_of_axes_have_no_axes(groups):
    assert hlo.axes_of_groups(groups, MESH) is None


@pytest.mark.parametrize(
    "groups", [((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7))]
)
def test_groups_that_are_the_same_parts_of_every_line_of_an_axis_are_that_axis(groups):
    assert hlo.axes_of_groups(groups, MESH) == ("tensor",)


# Collectives


@pytest.mark.parametrize(
    "line, op, axes, payload, wire",
    [
        ("f32[32,8] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%sum",
         "all-reduce", ("tensor",), 1024, 2 * 1024 * 3 // 4),
        ("f32[64,8] all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
         "all-gather", ("data",), 2048, 1024),
        ("f32[8,8] reduce-scatter(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum",
         "reduce-scatter", ("tensor",), 1024, 768),
        ("f32[32,8] all-to-all(%x), replica_groups={}, dimensions={0}",
         "all-to-all", ("data", "tensor"), 1024, 896),
        ("f32[32,8] collective-permute(%x), source_target_pairs={{0,4},{1,5},{2,6},{3,7}}",
         "collective-permute", ("data",), 1024, 1024),
        ("f32[32,8] collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
         "collective-permute", (), 1024, 0),
        ("f32[32,8] collective-broadcast(%x), replica_groups=mesh[data=2,tensor=4] {data}",
         "collective-broadcast", ("data",), 1024, 1024),
        ("f32[32,8] ragged-all-to-all(%x, %x, %x, %x, %x, /*index=5*/%x), "
         "replica_groups=[2,4]<=[8]",
         "ragged-all-to-all", ("tensor",), 1024, 768),
        ("f32[32,8] all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
         "all-reduce", (), 1024, 0),
    ],
)  # fmt: skip
def test_each_collective_has_axes_payload_and_bytes_sent(line, op, axes, payload, wire):
    found = one(f"  ROOT %y = {line}")
    assert (found.op, found.axes, found.bytes, found.wire_bytes) == (op, axes, payload, wire)
    assert (found.count, found.dtype, found.warning) == (1, "f32", "")
    assert not found.asynchronous and not found.in_conditional


def test_a_combined_collective_counts_all_its_buffers():
    found = one(
        "  %z = bf16[6] convert(%x)\n  ROOT %y = (f32[32,8], bf16[6]) all-reduce(%x, %z), "
        "replica_groups=[2,4]<=[8], to_apply=%sum"
    )
    assert [buffer.bytes for buffer in found.buffers] == [1024, 12]
    assert (found.bytes, found.dtype, found.wire_bytes) == (1036, "bf16+f32", 1554)


def wrapped(line: str) -> str:
    return f"%wrapped (p: f32[32,8]) -> f32[8,8] {{\n  %p = f32[32,8] parameter(0)\n{line}\n}}\n"


@pytest.mark.parametrize(
    "entry, before, payload",
    [
        ("  %s = f32[32,8] all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%sum\n"
         "  ROOT %y = f32[32,8] all-reduce-done(%s)", "", 1024),
        ("  %s = ((f32[32,8]), f32[32,8]) all-reduce-start(%x), replica_groups=[2,4]<=[8], "
         "to_apply=%sum\n  ROOT %y = f32[32,8] all-reduce-done(%s)", "", 1024),
        ("  %s = (f32[32,8], f32[128,8]) all-gather-start(%x), replica_groups=[2,4]<=[8]\n"
         "  ROOT %y = f32[128,8] all-gather-done(%s)", "", 4096),
        ("  %s = ((f32[32,8], f32[32,8]), (f32[128,8], f32[128,8])) all-gather-start(%x, %x), "
         "replica_groups=[2,4]<=[8]\n  ROOT %y = (f32[128,8], f32[128,8]) all-gather-done(%s)",
         "", 8192),
        ("  %s = (f32[32,8], f32[32,8], u32[], u32[]) collective-permute-start(%x), "
         "source_target_pairs={{0,1}}\n  ROOT %y = f32[32,8] collective-permute-done(%s)",
         "", 1024),
        ("  %s = ((f32[32,8]), f32[8,8]) reduce-scatter-start(%x), replica_groups=[2,4]<=[8]\n"
         "  ROOT %y = f32[8,8] reduce-scatter-done(%s)", "", 1024),
        ("  %s = ((f32[32,8]), f32[8,8], u32[]) async-start(%x), calls=%wrapped\n"
         "  %u = ((f32[32,8]), f32[8,8], u32[]) async-update(%s), calls=%wrapped\n"
         "  ROOT %y = f32[8,8] async-done(%u), calls=%wrapped",
         wrapped("  ROOT %r = f32[8,8] reduce-scatter(%p), replica_groups=[2,4]<=[8]"), 1024),
    ],
)  # fmt: skip
def test_start_and_done_count_once_whatever_their_form(entry, before, payload):
    found = one(entry, before)
    assert (found.count, found.axes, found.bytes) == (1, ("tensor",), payload)
    assert found.asynchronous


def test_a_send_has_the_axis_of_its_pairs():
    found = one(
        "  %t = token[] after-all()\n  ROOT %y = (f32[32,8], u32[], token[]) send(%x, %t), "
        'frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}},other="1"}'
    )
    assert (found.op, found.axes, found.bytes) == ("send", ("tensor",), 1024)


@pytest.mark.parametrize(
    "line, axes, warning",
    [
        ("all-reduce(%x), replica_groups={{0,1},{2,3},{4,6},{5,7}}", ("?",), "no product of"),
        ("all-reduce(%x), replica_groups=new{0}", ("?",), "has no known form"),
        ("all-scramble(%x), replica_groups=[2,4]<=[8]", ("?",), "not a collective known here"),
        ("collective-permute(%x), source_target_pairs={{0,9}}", ("?",), "no product of"),
    ],
)
def test_what_cannot_be_read_is_listed_with_a_warning(line, axes, warning):
    found = one(f"  ROOT %y = f32[32,8] {line}")
    assert found.axes == axes and warning in found.warning
    assert found.bytes == 1024


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 4 devices, but the program runs on 8; give"):
        hlo.collectives(module("  ROOT %y = f32[32,8] copy(%x)"), {"data": 2, "tensor": 2})
