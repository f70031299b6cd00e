"""The pipeline for functions and plain pytrees of one's own: dicts, flax linen, equinox."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxpar.batch import check_rows
from jaxpar.functions import Functions
from jaxpar.layout import Layout, nearest
from jaxpar.parts import num_layers, read_parts
from jaxpar.placement import pipeline_table, place_layers
from jaxpar.region import Region

OWN_AXES = ("pipe", "replica", "data")


def value_and_grad(
    embed: Callable,
    block: Callable,
    head_loss: Callable,
    *,
    mesh: Mesh,
    schedule: str | Callable = "1f1b",
    microbatches: int = 1,
    chunks: int = 1,
    remat: str = "none",
    precision: str = "fp32",
    idle: str = "auto",
    layers_per_stage: Sequence[int] | None = None,
) -> Callable:
    """(params, batch, key=None) -> (loss, gradients), as `jax.value_and_grad` of the whole model.

    `params` is any pytree with an entry `layers`: the weights of all blocks, each leaf with a
    leading dim of layers; everything else is for embed and head. `batch` is a dict of arrays
    [B, ...]. `embed(params, batch) -> x` and `head_loss(params, x, batch) -> (sum, count)` see
    `params` without its layers, `block(layer, x, batch) -> x` one layer; each sees one microbatch
    of one device group. The loss is the sum over everything divided by the global count (`count`
    None: the plain sum). `mesh` has an axis `pipe`, and `data` and `replica` for the rows.
    `batch["layer"]` is the block's number and, with `key`, `batch["dropout_key"]` the step's key.

    Raises ValueError for settings, layers or batches that cannot work, before anything compiles.
    """
    sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names}
    for axis, size in sizes.items():
        if axis not in OWN_AXES and size > 1:
            raise ValueError(
                f"the mesh has {axis}={size}; functions of your own run on the axes "
                f"{', '.join(OWN_AXES)} ({nearest(axis, OWN_AXES)})"
            )
    layout = Layout(
        **{axis: size for axis, size in sizes.items() if axis in OWN_AXES}, zero=0,
        schedule=schedule, microbatches=microbatches, chunks=chunks, remat=remat, idle=idle,
        precision=precision, sequence_parallel=False, layers_per_stage=layers_per_stage,
    )  # fmt: skip
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    functions = Functions(
        embed, lambda params, layer, x, batch: block(layer, x, batch), head_loss,
        lambda params, batch: batch,
    )  # fmt: skip
    if layout.pipe > 1:
        pipeline_table(layout)

    def function(params, batch: dict, key=None):
        check_rows(layout, jax.tree.leaves(batch)[0].shape[0])
        placement = place_layers(layout, num_layers(params))
        stored = placement.store(params)
        region = Region(layout, mesh, read_parts(stored, layout), functions, placement)
        leaves, tree = jax.tree.flatten(stored)
        loss, _, gradients = region.value_and_grad(leaves, dict(batch), key)
        return loss, placement.restore(tree.unflatten(gradients), params)

    return function
