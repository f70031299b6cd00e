"""Parallel layers: flax NNX modules that use a mesh axis only where it exists."""

from jaxpar.nn.attention import Attention, dense_attention, document_mask, self_attention
from jaxpar.nn.blockwise_attention import blockwise_attention
from jaxpar.nn.dropout import dropout
from jaxpar.nn.embedding import Embedding
from jaxpar.nn.linear import ColumnLinear, RowLinear
from jaxpar.nn.mlp import GeluMLP, SwiGLU
from jaxpar.nn.norms import LayerNorm, RMSNorm
from jaxpar.nn.order import Context, inverse, places
from jaxpar.nn.parallel import Settings, gather_sequence, local_sequence, settings, sum_partial
from jaxpar.nn.params import decay_mask, normal, param, stack
from jaxpar.nn.rotary import RopeScaling, rotate, tables

__all__ = [
    "Attention",
    "ColumnLinear",
    "Context",
    "Embedding",
    "GeluMLP",
    "LayerNorm",
    "RMSNorm",
    "RopeScaling",
    "RowLinear",
    "Settings",
    "SwiGLU",
    "blockwise_attention",
    "decay_mask",
    "dense_attention",
    "document_mask",
    "dropout",
    "gather_sequence",
    "inverse",
    "local_sequence",
    "normal",
    "param",
    "places",
    "rotate",
    "self_attention",
    "settings",
    "stack",
    "sum_partial",
    "tables",
]
