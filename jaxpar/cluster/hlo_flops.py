"""Floating-point operations of a compiled program, counted from its matrix products.

The one idea: a product does two operations per element of its result and per element that it sums
over, so shapes alone tell; what libraries compute (cuBLAS, cuDNN, oneDNN) shows its shapes in the
call. Elementwise work is not counted. A call that cannot be read is named, never taken for nothing.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpar.cluster.hlo_text import Instruction, Program, Shape, parse
from jaxpar.cluster.hlo_walk import BranchShare, walk

KINDS = ("dots", "convolutions", "attention", "causal_attention")
_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
_NO_PRODUCTS = {
    "AllocateBuffer", "AssumeGatherIndicesInBound", "LayoutConstraint", "MoveToDevice",
    "MoveToHost", "PadToStatic", "SPMDFullToShardShape", "SPMDShardToFullShape", "Sharding",
    "SliceToDynamic", "TopK", "__gpu$TopK", "annotate_device_placement",
    "x.shard_map", "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape",
}  # fmt: skip


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one device in one step, by what does them.

    Attributes:
      dots: matrix products, in the program or as library calls.
      convolutions: only positions inside the image count.
      attention: cuDNN attention, forward 2 and backward 5 products (it computes the scores again),
        each over the whole matrix of scores, whatever the mask.
      causal_attention: the part of `attention` that has a causal mask, of which cuDNN skips
        about half.
      unread: targets of custom calls whose work is not counted here, with their calls per step.
      unknown_loops: loops without a known trip count; what they contain is in none of the numbers.
    """

    dots: int | float = 0
    convolutions: int | float = 0
    attention: int | float = 0
    causal_attention: int | float = 0
    unread: tuple[tuple[str, int | float], ...] = ()
    unknown_loops: tuple[str, ...] = ()

    @property
    def total(self) -> int | float | None:
        """All of it; None when a loop's trip count is unknown."""
        return None if self.unknown_loops else self.dots + self.convolutions + self.attention


def flops(
    program: str | Program,
    *,
    branch_share: BranchShare = 1.0,
    trip_counts: Mapping[str, int] | None = None,
) -> Flops:
    """Count the operations of a compiled program, loops multiplied out.

    Args:
      program: `compiled.as_text()`, or what `parse` made of it.
      branch_share, trip_counts: as in `walk`.

    >>> text = '''HloModule product
    ... ENTRY %main (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
    ...   %a = f32[4,8]{1,0} parameter(0)
    ...   %b = f32[8,16]{1,0} parameter(1)
    ...   ROOT %c = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }'''
    >>> flops(text).total == 2 * 4 * 8 * 16
    True
    """
    program = parse(program) if isinstance(program, str) else program
    sums: dict[str, int | float] = {}
    unread: dict[str, int | float] = {}
    lost: dict[str, None] = {}
    for visit in walk(program, branch_share=branch_share, trip_counts=trip_counts):
        instruction = visit.instruction
        work = operations_of(instruction, visit.computation.by_name)
        if work is None:
            continue
        if visit.count is None:
            lost.update(dict.fromkeys(visit.unknown_loops))
            continue
        kinds, amount = work
        for kind in kinds:
            into = sums if kind in KINDS else unread
            into[kind] = into.get(kind, 0) + visit.count * amount
    return Flops(**sums, unread=tuple(unread.items()), unknown_loops=tuple(lost))


def operations_of(
    instruction: Instruction, inside: Mapping[str, Instruction]
) -> tuple[tuple[str, ...], int] | None:
    """The fields of `Flops` that an instruction adds to and how much; None when it adds nothing.

    A call that cannot be read gives its target as the field and 1.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in ("dot", "ragged-dot", "scaled-dot", "convolution", "custom-call"):
        return None
    shapes = [inside[name].shape for name in instruction.operands]
    if opcode == "dot":
        contracted = _dims(instruction.attributes.get("lhs_contracting_dims", "{}"))
        return ("dots",), _product(instruction.shape, shapes[0], contracted)
    if opcode == "convolution":
        return ("convolutions",), _convolution(
            instruction.attributes, shapes[0], shapes[1], instruction.shape
        )
    if opcode != "custom-call":
        return (opcode,), 1
    return _library_call(instruction, shapes)


def _library_call(
    instruction: Instruction, shapes: list[Shape]
) -> tuple[tuple[str, ...], int] | None:
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    config = _config(instruction.attributes.get("backend_config", "{}"))
    results = instruction.shape.leaves
    if target in _GEMMS and "gemm_backend_config" in config:
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        contracted = [int(dim) for dim in numbers["lhs_contracting_dimensions"]]
        return ("dots",), _product(results[0], shapes[0], contracted)
    if target.startswith("__onednn$matmul") and "onednn_matmul_config" in config:
        transposed = config["onednn_matmul_config"].get("transpose_a", False)
        contracted = [len(shapes[0].dims) - (2 if transposed else 1)]
        return ("dots",), _product(results[0], shapes[0], contracted)
    if target.startswith("__cudnn$conv") and len(shapes) >= 2:
        image, kernel, result = shapes[0], shapes[1], results[0]
        if "BackwardInput" in target:
            image, result = result, image
        elif "BackwardFilter" in target:
            kernel, result = result, kernel
        return ("convolutions",), _convolution(instruction.attributes, image, kernel, result)
    if target.startswith("__cudnn$fmha") and "cudnn_fmha_backend_config" in config:
        return _attention(target, config["cudnn_fmha_backend_config"], shapes)
    return None if target in _NO_PRODUCTS else ((target or "custom-call",), 1)


def _attention(target: str, config: dict, shapes: list[Shape]) -> tuple[tuple[str, ...], int]:
    """Products of cuDNN attention over scores [B, N, T, S], for q, k, v [B, T, N, H].

    Forward: scores and output. Backward: scores again, then the gradients of v, of the scores, of
    q and of k. Each does 2 B N T S H operations.
    """
    scores = math.prod(int(dim) for dim in config["intermediate_tensor_shape"]["dimensions"])
    query_dim, value_dim = shapes[0].dims[-1], shapes[2].dims[-1]
    forward = query_dim + value_dim
    backward = 3 * query_dim + 2 * value_dim
    amount = 2 * scores * (backward if "Backward" in target else forward)
    causal = "CAUSAL" in config.get("mask_type", "")
    return (("attention", "causal_attention") if causal else ("attention",)), amount


def _product(result: Shape, left: Shape, contracted: list[int]) -> int:
    return 2 * math.prod(result.dims) * math.prod(left.dims[dim] for dim in contracted)


def _convolution(attributes: Mapping[str, str], image: Shape, kernel: Shape, result: Shape) -> int:
    """2 x batch x features out x features in (of a group) x pairs of positions that meet.

    `dim_labels` such as b01f_01io->b01f name the dims of image, kernel and result.
    """
    left, right, out = re.split(r"_|->", attributes["dim_labels"])
    window = dict(re.findall(r"(\w+)=([\w\-]+)", attributes.get("window", "{}")))
    pairs = 1
    for place, label in enumerate(label for label in right if label.isdigit()):
        settings = {key: value.split("x")[place] for key, value in window.items()}
        sizes = image.dims[left.index(label)], kernel.dims[right.index(label)]
        pairs *= _meetings(*sizes, result.dims[out.index(label)], settings)
    batch, features = result.dims[out.index("b")], result.dims[out.index("f")]
    return 2 * batch * features * kernel.dims[right.index("i")] * pairs


def _meetings(image: int, kernel: int, result: int, settings: Mapping[str, str]) -> int:
    """How many (result, kernel) positions along one dim fall on an element of the image."""
    stride, spread = int(settings.get("stride", 1)), int(settings.get("rhs_dilate", 1))
    dilate, low = int(settings.get("lhs_dilate", 1)), int(settings.get("pad", "0").split("_")[0])
    places = np.arange(result)[:, None] * stride + np.arange(kernel)[None] * spread - low
    inside = (places >= 0) & (places <= (image - 1) * dilate) & (places % dilate == 0)
    return int(inside.sum())


def _config(text: str) -> dict:
    """A JSON backend_config; {} for the other forms that calls use."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return config if isinstance(config, dict) else {}


def _dims(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
