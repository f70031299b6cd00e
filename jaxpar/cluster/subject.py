"""What is compiled: a jitted function and its arguments as shapes, on the target's devices.

The one idea: nothing here exists but shapes and shardings, so moving a program to another cluster
is to give its arguments a mesh of other devices; a plan is planned again there.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxpar.batch import check_batch
from jaxpar.cluster import stand_in
from jaxpar.cluster.target import Target
from jaxpar.layout import Layout
from jaxpar.plan import Plan, find_model, make_plan

BATCH_TYPES = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
"""The arrays of a batch [rows, seq_len] that is given by its shape alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A jitted function with its arguments, ready to lower.

    `numbers` are the target's device numbers in the mesh's order: XLA's device i is numbers[i].
    `layout`, `model` (abstract) and `shape` (rows, seq_len) are those of a plan, else None.
    """

    function: Any
    args: tuple
    mesh_axes: Mapping[str, int]
    numbers: tuple[int, ...]
    layout: Layout | None = None
    model: nnx.Module | None = None
    shape: tuple[int, int] | None = None
    stands_in: str = ""
    """Why attention in blocks stands for cuDNN's, or ""."""


def of_plan(
    plan: Plan,
    target: Target,
    batch: tuple[int, int] | dict,
    *,
    tx=None,
    loss: Callable | None = None,
    clip_norm: float | None = None,
    across_hosts: Sequence[str] = (),
) -> Subject:
    """The train step of a plan with the optimizer `tx`, or without one its gradients.

    `batch` is (rows, seq_len) or a dict of arrays or shapes [rows, seq_len]. Raises ValueError for
    a target or a batch that the layout does not fit.
    """
    mesh = target.mesh(plan.layout, across_hosts)
    why = "" if target.is_cpu else stand_in.reason(plan.layout, find_model(plan.state))
    kernel = "blockwise" if why or plan._asked_kernel == "blockwise" else None
    plan = make_plan(plan.layout, plan._init, mesh=mesh, attention_kernel=kernel)
    batch = _batch(plan, batch)
    shapes = jax.eval_shape(plan.placement.store, plan.state)
    state = jax.tree.map(_placed, shapes, plan.shardings)
    model, shardings = find_model(state), find_model(plan.shardings)
    if tx is not None:
        function, args = plan.train_step(tx, loss, clip_norm=clip_norm), (state, batch)
    else:
        gradients = plan.value_and_grad(loss or (lambda model, x, batch: model.loss(x, batch)))
        function, args = jax.jit(gradients, out_shardings=(None, shardings)), (model, batch)
    return Subject(
        function=function,
        args=args,
        mesh_axes=dict(mesh.shape),
        numbers=_numbers(mesh, target),
        layout=plan.layout,
        model=find_model(plan.state),
        shape=batch["tokens"].shape,
        stands_in=why,
    )


def _batch(plan: Plan, batch: tuple[int, int] | dict) -> dict:
    if not isinstance(batch, Mapping):
        rows, seq_len = batch
        batch = {
            name: jax.ShapeDtypeStruct((rows, seq_len), dtype)
            for name, dtype in BATCH_TYPES.items()
        }
    check_batch(plan.layout, batch)
    return {name: _placed(array, plan.batch_sharding) for name, array in batch.items()}


def of_function(function, target: Target, args: tuple) -> Subject:
    """A jitted function of the user's; its arguments' NamedShardings say the mesh.

    Arguments are arrays or shapes; those on a mesh of other devices are moved to the target's.
    Raises ValueError for a function that is not jitted and for meshes that do not fit the target.
    """
    if not hasattr(function, "lower"):
        raise ValueError(
            f"{function!r} is neither a Plan nor a jitted function; give jax.jit(function)"
        )
    mesh = _mesh_of(args)
    if mesh is None:
        if target.num_devices > 1:
            raise ValueError(
                f"no argument has a NamedSharding, and the target is {target}; give the arguments "
                "(arrays or jax.ShapeDtypeStruct) shardings on a mesh of that many devices"
            )
        one = SingleDeviceSharding(target.devices()[0])
        return Subject(
            function=function,
            args=jax.tree.map(lambda a: _placed(a, one), args),
            mesh_axes={},
            numbers=(0,),
        )
    mesh = moved_mesh(mesh, target)
    return Subject(
        function=function,
        args=jax.tree.map(lambda a: _moved(a, mesh), args),
        mesh_axes=dict(mesh.shape),
        numbers=_numbers(mesh, target),
    )


def moved_mesh(mesh: Mesh, target: Target) -> Mesh:
    """The same mesh on the target's devices, in the same order of their numbers.

    Raises ValueError where their numbers of devices differ.
    """
    if mesh.size != target.num_devices:
        axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"the arguments' mesh {axes} has {mesh.size} devices, and the target is {target}; "
            f"give a target of {mesh.size} or arguments on a mesh of {target.num_devices}"
        )
    devices = target.devices()
    shape = tuple(mesh.shape.values())
    order = range(mesh.size)
    if isinstance(mesh, Mesh):
        ids = [device.id for device in mesh.devices.flat]
        order = ids if sorted(ids) == list(range(mesh.size)) else order
    grid = np.array([devices[i] for i in order], dtype=object).reshape(shape)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def _mesh_of(args: tuple):
    """The one mesh of all arguments' NamedShardings, or None."""
    found = []
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh not in found:
            found.append(sharding.mesh)
    if len(found) > 1:
        meshes = " and ".join(str(dict(mesh.shape)) for mesh in found)
        raise ValueError(f"the arguments are on {len(found)} meshes, {meshes}; put them on one")
    return found[0] if found else None


def _moved(leaf, mesh: Mesh):
    """An argument as a shape on `mesh`; what has no NamedSharding is left to jit."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        kind = "pinned_host" if sharding.memory_kind == "pinned_host" else None
        return _placed(leaf, NamedSharding(mesh, sharding.spec, memory_kind=kind))
    return _placed(leaf, None) if isinstance(leaf, jax.Array) else leaf


def _placed(leaf, sharding):
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def _numbers(mesh: Mesh, target: Target) -> tuple[int, ...]:
    place = {device: number for number, device in enumerate(target.devices())}
    return tuple(place[device] for device in mesh.devices.flat)
