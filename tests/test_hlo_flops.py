"""Operations of library calls and odd shapes, in HLO text written by hand."""

import pytest
from hlo_samples.handmade import module

from jaxpar.cluster import hlo

GEMM = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":'
    '["0"],"rhs_contracting_dimensions":["1"]}}}'
)


def count(line: str, settings: str = "", **others) -> hlo.Flops:
    given = "".join(f"  %{name} = {shape} custom-call(), custom_call_target=\"TopK\"\n"
                    for name, shape in others.items())  # fmt: skip
    return hlo.flops(module(f"{given}  ROOT %y = {line}{settings}"))


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_cublas_products_are_read_from_their_settings(target):
    found = count(
        f'(bf16[8,16], s8[99]) custom-call(%x, %b), custom_call_target="{target}", {GEMM}',
        b="bf16[16,32]",
    )
    assert found == hlo.Flops(dots=2 * 8 * 16 * 32)


@pytest.mark.parametrize("transposed, inner", [("false", 8), ("true", 32)])
def test_onednn_products_are_read_from_their_settings(transposed, inner):
    found = count(
        'f32[4,16] custom-call(%x, %x), custom_call_target="__onednn$matmul", '
        f'backend_config={{"onednn_matmul_config":{{"transpose_a":{transposed}}}}}'
    )
    assert found.total == 2 * 4 * 16 * inner


@pytest.mark.parametrize(
    "target, result, operands",
    [
        ("__cudnn$convForward", "f32[1,4,4,5]", "%image, %kernel"),
        ("__cudnn$convBackwardInput", "f32[1,8,8,3]", "%out, %kernel"),
        ("__cudnn$convBackwardFilter", "f32[2,2,3,5]", "%image, %out"),
    ],
)
def test_cudnn_convolutions_cost_the_same_forward_and_backward(target, result, operands):
    found = count(
        f"({result}, u8[0]) custom-call({operands}), window={{size=2x2 stride=2x2}}, "
        f'dim_labels=b01f_01io->b01f, custom_call_target="{target}"',
        image="f32[1,8,8,3]", kernel="f32[2,2,3,5]", out="f32[1,4,4,5]",
    )  # fmt: skip
    assert found == hlo.Flops(convolutions=2 * 5 * 3 * 8 * 8)


def test_a_dilated_convolution_counts_only_the_elements_it_meets():
    found = count(
        "f32[1,5,1] convolution(%image, %kernel), "
        "window={size=3 pad=1_1 lhs_dilate=2}, dim_labels=b0f_0io->b0f",
        image="f32[1,3,1]", kernel="f32[3,1,1]",
    )  # fmt: skip
    # Image a.b.c padded to .a.b.c. : windows .a. a.b .b. b.c .c. meet 1 + 2 + 1 + 2 + 1 elements.
    assert found.total == 2 * 7


def test_a_call_that_cannot_be_read_is_named():
    found = count('f32[4] custom-call(%x), custom_call_target="my$kernel"')
    assert found.unread == (("my$kernel", 1),)
    found = count('f32[4] custom-call(%x), custom_call_target="__cublas$lt$matmul"')
    assert found.unread == (("__cublas$lt$matmul", 1),)
    found = count('f32[4] custom-call(%x), custom_call_target="k", backend_config={a = 1 : i8}')
    assert found.unread == (("k", 1),)
    found = count("f32[4,4] ragged-dot(%x, %x, %x), lhs_contracting_dims={1}")
    assert found.unread == (("ragged-dot", 1),)


def test_products_in_an_unknown_loop_leave_no_total():
    before = (
        "%body (p: (f32[8,8])) -> (f32[8,8]) {\n  %p = (f32[8,8]) parameter(0)\n"
        "  %v = f32[8,8] get-tuple-element(%p), index=0\n"
        "  %d = f32[8,8] dot(%v, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT %o = (f32[8,8]) tuple(%d)\n}\n"
        "%cond (p: (f32[8,8])) -> pred[] {\n  %p = (f32[8,8]) parameter(0)\n"
        '  ROOT %g = pred[] custom-call(%p), custom_call_target="TopK"\n}\n'
    )
    entry = (
        "  %d = f32[32,32] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
        "  %t = (f32[8,8]) tuple(%x)\n  ROOT %w = (f32[8,8]) while(%t), condition=%cond, body=%body"
    )
    found = hlo.flops(module(entry, before))
    assert (found.dots, found.unknown_loops, found.total) == (2 * 32 * 32 * 8, ("w",), None)
    assert hlo.flops(module(entry, before), trip_counts={"w": 3}).total == (
        2 * 32 * 32 * 8 + 3 * 2 * 8 * 8 * 8
    )
