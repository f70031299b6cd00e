"""Attention in blocks in place of cuDNN's, where a compile without a GPU cannot have cuDNN's.

The one idea: both keep the same arrays for the backward pass (q, k, v, the output and one fp32
number per query and head), so what differs is what a pass holds while it runs, and that is stated.
XLA's plain attention would not do: it stores the matrix of scores.
"""

from jaxpar.cluster.target import has_cudnn
from jaxpar.layout import BATCH_AXES, Layout
from jaxpar.nn.blockwise_attention import BLOCK

_CUDNN_HEAD_DIM = 128
"""Largest head_dim that JAX gives to cuDNN without asking the GPU, which is not there."""


def reason(layout: Layout, model) -> str:
    """Why attention in blocks has to stand for cuDNN's when a plan for GPUs is compiled, or ""."""
    if layout.precision != "bf16":
        return ""  # such a run takes XLA's attention
    if not has_cudnn():
        return "cuDNN is not installed (package nvidia-cudnn-cu12)"
    head_dim = getattr(getattr(model, "config", None), "head_dim", 0)
    if head_dim > _CUDNN_HEAD_DIM:
        return f"JAX takes cuDNN for head_dim {head_dim} only where the GPU is"
    return ""


def warning(why: str, layout: Layout, model, shape: tuple[int, int]) -> str:
    """What it changes in a report, with its numbers; `shape` is the batch's (rows, seq_len)."""
    text = (
        f"{why}, so attention is compiled as loops over blocks of {BLOCK} queries and keys: as "
        "many operations, counted as products"
    )
    if not hasattr(model, "config"):
        return text
    more = bytes_more(layout, model.config, shape) / 2**20
    return f"{text}; memory differs by at most {more:,.0f} MiB"


def bytes_more(layout: Layout, config, shape: tuple[int, int]) -> int:
    """Bytes that attention in blocks holds while it runs and cuDNN's need not.

    The fp32 sums of the gradients of keys and values, and four blocks of fp32 scores: scores,
    weights and their gradients.
    """
    rows, length = shape
    rows //= layout.size(BATCH_AXES) * layout.microbatches
    heads = -(-config.num_heads // layout.tensor)
    kv_heads = -(-config.num_kv_heads // layout.tensor)
    sums = 2 * rows * length * kv_heads * config.head_dim
    block = min(BLOCK, length)
    return 4 * (sums + 4 * rows * heads * block * block)
