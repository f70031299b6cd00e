"""What `print(plan)` shows: where every array lives, and what each axis sends in a step.

The one idea: everything a layout decides is listed, also where it decided against splitting, so
that nothing falls back in silence.
"""

import dataclasses
import math

import jax
from flax import nnx

from jaxpar import costs
from jaxpar.layout import AXES, BATCH_AXES, ZERO_AXES, Layout, ring_and_ulysses
from jaxpar.pipeline import draw
from jaxpar.placement import pipeline_table
from jaxpar.splits import Split

TOKENS = 1000
"""Tokens of one device's rows that activations are counted for: a plan knows no batch."""


def plan_text(plan) -> str:
    """The layout, every array with its split and bytes, what each axis sends, and warnings."""
    model, parameters, others = _arrays(plan)
    lines = [layout_line(plan.layout), "", "parameters", *_table([_row(a) for a in parameters])]
    if others:
        lines += ["", "optimizer state and others", *_table(_grouped(parameters, others))]
    lines += ["", _totals(parameters, others), ""]
    lines += [*_pipeline(plan), ""] if plan.layout.pipe > 1 else []
    lines += _sent(model, plan.layout)
    window = getattr(getattr(model, "config", None), "sliding_window", None)
    lines += [f"warning: {w}" for w in warnings(plan.layout, window)]
    return "\n".join(line.rstrip() for line in lines)


def layout_line(layout: Layout) -> str:
    """A layout in one line.

    >>> layout_line(Layout(data=4, tensor=2, microbatches=2))
    '8 devices: data=4 tensor=2 | zero=1 microbatches=2 remat=none precision=bf16 sequence_parallel'
    """
    axes = " ".join(f"{a}={n}" for a, n in layout.axis_sizes.items() if n > 1) or "no axis"
    rest = [f"{n}={getattr(layout, n)}" for n in ("zero", "microbatches", "remat", "precision")]
    rest += ["sequence_parallel"] if layout.tensor > 1 and layout.sequence_parallel else []
    if layout.context > 1:
        rest += [f"attention={layout.attention}", f"context_order={layout.context_order}"]
        rest += [f"ulysses={layout.ulysses}"] if layout.ulysses > 1 else []
    devices = f"{layout.num_devices} device{'s' if layout.num_devices > 1 else ''}"
    return f"{devices}: {axes} | {' '.join(rest)}"


def split_words(split: Split) -> str:
    """How an array is split: dim/axes for every split dim, or "whole".

    >>> import jax.numpy as jnp
    >>> split_words(Split("w", (8, 4), jnp.float32, ("embed", "ffn"), (("data",), ("tensor",))))
    'embed/data, ffn/tensor'
    """
    names = [d or f"dim {i}" for i, d in enumerate(split.dims)]
    parts = [f"{d}/{'+'.join(axes)}" for d, axes in zip(names, split.axes, strict=True) if axes]
    return ", ".join(parts) or "whole"


def warnings(layout: Layout, window: int | None = None) -> list[str]:
    """What is legal and probably not meant, or slower than it need be.

    `window`: the model's sliding window, in tokens.

    >>> warnings(Layout(tensor=4, zero=3))
    ['zero=3 has no effect: data, expert and context all have one device']
    """
    found = []
    alone = not layout.present(ZERO_AXES)
    if layout.zero and alone and layout.num_devices > 1:
        found.append(
            f"zero={layout.zero} has no effect: {', '.join(ZERO_AXES[:-1])} and "
            f"{ZERO_AXES[-1]} all have one device"
        )
    m = layout.microbatches
    if layout.zero >= 2 and m > 1 and not alone:
        gathers = f"gathers every block {2 * m} times and " if layout.zero == 3 else ""
        found.append(
            f"zero={layout.zero} with microbatches={m} {gathers}reduces gradients {m} "
            "times a step; zero=1 does each once, where its memory fits"
        )
    if layout.replica > 1 and layout.zero == 0:
        found.append(f"replica={layout.replica} with zero=0 is the same as a larger data")
    if layout.tensor > 1 and not layout.sequence_parallel:
        found.append(
            f"tensor={layout.tensor} without sequence_parallel keeps activations between "
            f"blocks {layout.tensor} times, for the same bytes sent"
        )
    return found + _of_context(layout, window)


def _of_context(layout: Layout, window: int | None) -> list[str]:
    if layout.context == 1:
        default = Layout()
        names = ("attention", "context_order", "ulysses")
        changed = [n for n in names if getattr(layout, n) != getattr(default, n)]
        return [
            f"{n}={getattr(layout, n)!r} has no effect: context has one device" for n in changed
        ]
    found = []
    c, _ = ring_and_ulysses(layout.context, layout.attention, layout.ulysses)
    if layout.context_order == "contiguous" and c > 1 and window is None:
        found.append(
            f"context_order='contiguous' gives the last of {c} in the ring {2 * c - 1} times the "
            "attention of the first, and all wait for it; zigzag gives all the same"
        )
    if window is not None and layout.circulates:
        found.append(
            f"a window of {window} tokens sees few of the keys that attention={layout.attention!r} "
            "sends around, so little work hides them"
        )
    if layout.circulates and layout.pipe > 1:
        found.append(
            f"pipe={layout.pipe} with attention={layout.attention!r}: stages without work compute "
            "all the same, also in places without a layer, and drop it"
        )
    return found


# ---- which arrays there are


@dataclasses.dataclass(frozen=True)
class _Array:
    """One array of a state: its name, its shape in the model's own order, split and bytes."""

    name: str
    shape: tuple[int, ...]
    split: Split
    bytes: int


def _arrays(plan) -> tuple[nnx.Module, list[_Array], list[_Array]]:
    """(the abstract model, its arrays, all other arrays), parameters named as in the model."""
    is_module = lambda v: isinstance(v, nnx.Module)  # noqa: E731
    flat, _ = jax.tree_util.tree_flatten_with_path(plan.state, is_leaf=is_module)
    modules = [(keys, v) for keys, v in flat if is_module(v) and hasattr(v, "layers")]
    inside, model = min(modules, key=lambda item: len(item[0]))  # optimizers hold some, deeper in
    prefix = jax.tree_util.keystr(inside, simple=True, separator=".") + "."
    leaves, _ = jax.tree_util.tree_flatten_with_path(plan.state)
    sizes = costs.state_bytes(plan)
    parameters, others = [], []
    for (keys, leaf), split in zip(leaves, plan.splits, strict=True):
        mine = keys[: len(inside)] == inside
        name = split.path.removeprefix(prefix) if mine and inside else split.path
        array = _Array(name, tuple(leaf.shape), split, sizes[split.path])
        (parameters if mine else others).append(array)
    return model, parameters, others


def _grouped(parameters: list[_Array], others: list[_Array]) -> list[tuple]:
    """Rows of the other arrays; several that follow parameters, or hold one number, make one."""
    owners = {p.name: p for p in parameters}
    families: dict[tuple, list[_Array]] = {}
    for array in others:
        names = array.name.split(".")
        ends = (".".join(names[i:]) for i in range(len(names)))
        owner = owners.get(next((e for e in ends if e in owners), ""))
        if owner is None:
            families[array.name, ""] = [array]
            continue
        kind = array.name
        if (owner.shape, owner.split.axes) == (array.shape, array.split.axes):
            kind = "each like its parameter"
        elif math.prod(array.shape) == 1:
            kind = "each one number, whole"
        families.setdefault((array.name.removesuffix(owner.name), kind), []).append(array)
    rows = []
    for (prefix, kind), members in families.items():
        if len(members) == 1:
            rows.append(_row(members[0]))
            continue
        types = "+".join(sorted({str(a.split.dtype) for a in members}))
        size = sum(a.bytes for a in members)
        rows.append((f"{prefix}*", f"{len(members)} arrays", types, kind, f"{size:,}", ""))
    return rows


# ---- words and columns


def _row(array: _Array) -> tuple:
    shape = " x ".join(map(str, array.shape)) or "one number"
    split = array.split
    return (array.name, shape, str(split.dtype), split_words(split), f"{array.bytes:,}", split.note)


def _table(rows: list[tuple]) -> list[str]:
    return _columns(
        ("array", "shape", "type", "split (dim/axes)", "bytes/device", "note"), rows, right=(4,)
    )


def _columns(head: tuple, rows: list[tuple], right: tuple[int, ...]) -> list[str]:
    rows = [head, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _totals(parameters: list[_Array], others: list[_Array]) -> str:
    count = sum(math.prod(a.shape) for a in parameters)
    mine, rest = (sum(a.bytes for a in group) for group in (parameters, others))
    return (
        f"{count:,} parameters; on each device {mine:,} bytes of parameters, {rest:,} of other "
        f"state, {mine + rest:,} in all ({(mine + rest) / 2**30:.3f} GiB)"
    )


def _sent(model, layout: Layout) -> list[str]:
    try:
        parameters = costs.parameter_traffic(model, layout)
        known = hasattr(model, "config")  # the formulas read sizes from a model's config
        activations = _activations(model, layout) if known else []
    except ValueError as error:
        return [f"what each axis sends per step: not known ({error})"]
    if not parameters and not activations:
        return ["nothing is sent: one device"]
    lines = ["what each device sends per step, parameters and gradients", *_sums(parameters)]
    inner = [t for t in activations if {"pipe", "tensor", "context"}.intersection(t.axes)]
    if inner:
        words = "microbatches of" if layout.pipe > 1 else "every"
        lines += [f"and for {words} {TOKENS:,} tokens of its rows, activations", *_sums(inner)]
    if not known:
        lines += ["and activations: not known, since the model has no `config` with its sizes"]
    return lines


def _activations(model, layout: Layout) -> list[costs.Transfer]:
    """Of one microbatch of TOKENS tokens; of a whole step of such where there are stages."""
    if layout.pipe == 1:
        layout = dataclasses.replace(layout, microbatches=1)
    return costs.activation_traffic(
        model, layout, layout.size(BATCH_AXES) * layout.microbatches, TOKENS
    )


def _pipeline(plan) -> list[str]:
    """The schedule with its bubble, what each stage holds and what it keeps."""
    table, counts = pipeline_table(plan.layout), plan.placement.counts
    rows = [r for r in draw.summary(table) if r[0] in ("ticks", "bubble", "live", "messages")]
    layers = " ".join("+".join(map(str, stage)) for stage in counts.tolist())
    rows.append(("layers", f"{layers} per stage"))
    return [f"pipeline: {draw.title(table)}", *(f"  {name:9} {words}" for name, words in rows)]


def _sums(transfers: list[costs.Transfer]) -> list[str]:
    groups: dict[tuple, list[costs.Transfer]] = {}
    for t in sorted(transfers, key=lambda t: [AXES.index(a) for a in t.axes]):
        groups.setdefault((t.axes, t.op), []).append(t)
    rows = []
    for (axes, op), members in groups.items():
        numbers = (
            sum(t.count for t in members),
            sum(t.total_bytes for t in members),
            sum(t.wire_bytes for t in members),
        )
        rows.append(("+".join(axes), op, *(f"{n:,}" for n in numbers)))
    return _columns(
        ("axes", "operation", "executions", "payload bytes", "bytes sent"), rows, right=(2, 3, 4)
    )
