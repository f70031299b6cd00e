"""Where a model's layers lie on the stages: canonical order, storage order and the one mapping.

Canonical: the model's own order, without padding; what is on disk and in `plan.state`. Storage:
by stage, then chunk, each padded with layers of zeros to the largest count; what lives on the
mesh. With one chunk and equal counts the two are the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.layout import Layout
from jaxpar.pipeline.schedules import get_schedule, gpipe, ring
from jaxpar.pipeline.split import canonical_order, split_layers, storage_order
from jaxpar.pipeline.table import Table, lower


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """`order[place]` is the layer stored there, -1 for padding; `counts[stage, chunk]` layers."""

    num_layers: int
    order: np.ndarray
    counts: np.ndarray

    @property
    def moves(self) -> bool:
        """Whether storage order differs from canonical order."""
        return not np.array_equal(self.order, np.arange(self.num_layers))

    def is_stacked(self, keys, leaf) -> bool:
        """Whether a leaf of a canonical state has one row per layer."""
        names = jax.tree_util.keystr(keys, simple=True, separator=".").split(".")
        return "layers" in names and leaf.ndim > 0 and leaf.shape[0] == self.num_layers

    def store(self, state):
        """Canonical -> storage; padding layers are 0."""

        def move(keys, leaf):
            if not self.is_stacked(keys, leaf):
                return leaf
            rows = jnp.take(leaf, jnp.maximum(self.order, 0), axis=0)
            keep = (self.order >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.where(keep, rows, jnp.zeros((), leaf.dtype))

        return jax.tree_util.tree_map_with_path(move, state) if self.moves else state

    def restore(self, state, canonical):
        """Storage -> canonical; `canonical` is the abstract canonical state."""
        places = canonical_order(self.order)

        def move(keys, leaf, abstract):
            return jnp.take(leaf, places, axis=0) if self.is_stacked(keys, abstract) else leaf

        if not self.moves:
            return state
        return jax.tree_util.tree_map_with_path(move, state, canonical)


def place_layers(layout: Layout, num_layers: int) -> Placement:
    """Decides which layers each stage holds; 30 layers on pipe=4 become 8, 8, 7, 7.

    Raises ValueError for combinations that cannot work, in the layout's own words.
    """
    counts = split_layers(num_layers, layout.pipe, layout.chunks, layout.layers_per_stage)
    placement = getattr(get_schedule(layout.schedule), "placement", ring)
    order = storage_order(counts, layout.pipe, layout.chunks, placement)
    return Placement(num_layers, order.reshape(-1), (order >= 0).sum(axis=2))


@functools.cache
def _lowered(schedule, stages: int, microbatches: int, chunks: int) -> Table:
    return lower(schedule, stages, microbatches, chunks)


def pipeline_table(layout: Layout, train: bool = True) -> Table:
    """The layout's schedule, lowered. Without `train`: forwards only, in GPipe's order.

    >>> len(pipeline_table(Layout(pipe=2, microbatches=3)).ticks)
    5
    """
    schedule = layout.schedule
    if not train:
        schedule = _forward_schedule(getattr(get_schedule(schedule), "placement", ring))
    return _lowered(schedule, layout.pipe, layout.microbatches, layout.chunks)


@functools.cache
def _forward_schedule(placement):
    def forward(stage, stages, microbatches, chunks):
        return gpipe(stage, stages, microbatches, chunks)

    forward.placement = placement
    return forward
