"""What blocks send over `tensor` and `context`, for `costs.activation_traffic`.

The one idea: every variant moves keys and values of one block, forward once and backward twice
(keys and values again, and their gradients), or exchanges the sequence for heads and back.
"""

import math

import jax.numpy as jnp

from jaxpar.costs_pipeline import Passes
from jaxpar.layout import BATCH_AXES, Layout
from jaxpar.region import COMPUTE

Row = tuple[str, str, tuple[str, ...], int, int, int]
"""What, operation, axes, executions in a step, bytes of one, devices of a group."""

AXES = ("context",)
TOKEN = 4  # bytes of a number of the batch


def over_tensor(layout: Layout, often: Passes, size: int) -> list[Row]:
    """What blocks, embedding and head send over `tensor` in a step; `size`: bytes of an x[b, t, D]
    of the whole sequence that a device group holds (arXiv 2205.05198, section 4.2.2)."""
    m, forward, backward = layout.microbatches, often.forward, often.backward
    again = backward * (layout.remat != "none")
    sums_again = again * (2 if layout.remat == "stage" else 1)
    gather, scatter, both = "all-gather", "reduce-scatter", "all-reduce"
    if layout.sequence_parallel:
        table = [
            ("embedding forward", scatter, m),
            ("embedding backward", gather, m),
            ("blocks forward", gather, 2 * forward),
            ("blocks forward", scatter, 2 * forward),
            ("blocks backward", gather, 2 * backward),
            ("blocks backward", scatter, 2 * backward),
            ("blocks recomputed", gather, 2 * again),
            ("blocks recomputed", scatter, sums_again),
            ("head forward", gather, m),
            ("head backward", scatter, m),
        ]
    else:
        table = [
            ("embedding forward", both, m),
            ("blocks forward", both, 2 * forward),
            ("blocks backward", both, 2 * backward),
            ("head backward", both, m),
            ("blocks recomputed", both, sums_again),
        ]
    return [
        (what, op, ("tensor",), count, size, layout.tensor) for what, op, count in table if count
    ]


def over_context(
    config, layout: Layout, often: Passes, global_batch: int, seq_len: int
) -> list[Row]:
    """What attention sends in a step.

    s tokens of a row, b rows of a microbatch, g kv heads and a heads on a device of head_dim h,
    context c = ring r x ulysses u. A block sends, in the compute type:

    - ring: r-1 permutations of k and v, 2 b s/r g/u h, forward, and backward of both them and their
      gradients (arXiv 2310.01889);
    - allgather: k and v of all forward and backward, and a reduce-scatter of their gradients, each
      2 b s g h (arXiv 2407.21783, section 3.3.2); a block that is recomputed gathers them once for
      both passes;
    - ulysses: all-to-alls of q, of k and v, and of the result, forward and backward; kv heads fewer
      than u travel as u (arXiv 2309.14509, section 3.2).

    Once a step, but for contiguous order, the batch's tokens, targets and weights are gathered.
    """
    c = layout.context
    if c == 1:
        return []
    rows = global_batch // layout.size(BATCH_AXES)
    found = []
    if layout.context_order != "contiguous":
        for what in ("tokens", "targets", "weights"):
            found.append((f"{what} of whole rows", "all-gather", 1, rows * seq_len * TOKEN))
    rows //= layout.microbatches
    again = often.backward * (layout.remat != "none")
    forward, backward = often.forward + again, often.backward
    item = jnp.dtype(COMPUTE[layout.precision]).itemsize
    size = item * config.head_dim * rows * seq_len // c  # of one head's share
    heads = config.num_heads // layout.tensor
    kv = 2 * max(config.num_kv_heads // layout.tensor, 1)
    u = {"ulysses": c, "ring+ulysses": layout.ulysses}.get(layout.attention, 1)
    ring = c // u
    if u > 1:
        kv = 2 * math.lcm(kv // 2, u)
        for what, n, bytes_ in (
            ("heads for sequence: queries", 1, heads), ("keys and values", 1, kv),
            ("sequence for heads", 1, heads),
        ):  # fmt: skip
            found.append((what, "all-to-all", n * (forward + backward), size * bytes_))
    if layout.attention == "allgather":
        gathers = often.forward + backward * (2 if layout.remat == "stage" else 1)
        found.append(("keys and values", "all-gather", gathers, c * size * kv))
        found.append(("their gradients", "reduce-scatter", backward, c * size * kv))
    elif ring > 1:  # s/r tokens of g/u heads are as many numbers as s/c of g
        hops = (ring - 1) * (forward + backward)
        found.append(("keys and values", "collective-permute", hops, size * kv))
        hops = (ring - 1) * backward
        found.append(("their gradients", "collective-permute", hops, size * kv))
    return [
        (f"attention, {what}", op, AXES, n, size, u if op == "all-to-all" else c)
        for what, op, n, size in found
    ]
