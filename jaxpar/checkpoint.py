"""Checkpoints: the state on disk in canonical form, read back onto any mesh.

The one idea: what is written is a plain nested dict of arrays, keyed by each array's path, in
canonical order and without padding. Nothing of the layout that wrote it is in there, so any layout
reads it, each device only its own pieces. Orbax writes it: complete or not at all.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxpar.plan import Plan


class Checkpoint:
    """The checkpoints of one run: saves every `every` steps, keeps the newest `keep`.

    Writing goes on in the background while training continues; `wait()` waits for it. Use it as a
    context manager, or call `close()` at the end. Nothing is created before the first save.

        checkpoint = jp.Checkpoint("runs/tiny/checkpoint", plan, every=500)
        state, start = checkpoint.restore() or (plan.init(jax.random.key(0)), 0)
    """

    def __init__(self, directory: str | Path, plan: Plan, every: int = 1, keep: int | None = 3):
        for name, value in (("every", every), ("keep", keep)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (name == "keep" and value is None):
                raise ValueError(
                    f"{name}={value!r} is not a number of steps or checkpoints; "
                    "use a whole number from 1 up"
                )
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"{directory} is a file; a checkpoint directory is a folder or new")
        self.plan = plan
        self.every, self.keep = every, keep
        self._saved: set[int] = set()

    def restore(self, step: int | None = None) -> tuple[Any, int] | None:
        """(state, step) of the newest checkpoint, or of `step`; None where there is none.

        The state lies on the mesh as `plan.shardings` says, as after `plan.init`. Raises
        ValueError where paths, shapes or types differ from the plan's: nothing is converted,
        padded or left out.
        """
        import orbax.checkpoint as ocp

        steps = self.steps()
        if step is None and not steps:
            return None
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ValueError(f"{self.directory} has no step {step}; it has {steps or 'none'}")
        wanted = self._abstract()
        _check(self._manager.item_metadata(step), wanted, f"{self.directory.name}/{step}")
        saved = self._manager.restore(step, args=ocp.args.StandardRestore(_nest(wanted)))
        self._saved.update(s for s in steps if s <= step)
        leaves = [_at(saved, keys) for keys, _ in wanted]
        state = jax.tree.unflatten(jax.tree.structure(self.plan.state), leaves)
        return self.plan.stored(state), step

    def save(self, step: int, state, force: bool = False) -> bool:
        """Saves `state` as the one after `step` steps, if `every` divides it or with `force`.

        Returns once the state is copied from the devices, so its arrays may be donated; says
        whether it saved. Raises ValueError where the directory has steps up to `step` or beyond
        that this run did not write or restore: another run lives there.
        """
        import orbax.checkpoint as ocp

        if not force and step % self.every:
            return False
        if step in self._saved:
            return False
        strange = [s for s in self.steps() if s >= step and s not in self._saved]
        if strange:
            raise ValueError(
                f"{self.directory} already holds step {strange[-1]} of another run, and this run "
                f"is at step {step}; call restore() first to go on from it, or use a new directory"
            )
        self._saved.add(step)
        tree = _nest(_named(self.plan.canonical(state)))
        return self._manager.save(step, args=ocp.args.StandardSave(tree), force=True)

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order."""
        return sorted(self._manager.all_steps()) if self.directory.is_dir() else []

    def wait(self) -> None:
        """Returns when everything saved so far is complete on disk; raises what went wrong."""
        if "_manager" in self.__dict__:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and releases the threads that write."""
        if "_manager" in self.__dict__:
            self._manager.close()
            del self.__dict__["_manager"]

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @cached_property
    def _manager(self):
        import orbax.checkpoint as ocp

        return ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=self.keep),
            item_handlers=ocp.StandardCheckpointHandler(),
        )

    def _abstract(self) -> list[tuple[tuple[str, ...], jax.ShapeDtypeStruct]]:
        """(path, shape, type and sharding) of every array that is on disk."""
        named, places = _named(self.plan.state), jax.tree.leaves(self.plan.canonical_shardings)
        return [
            (keys, jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place))
            for (keys, a), place in zip(named, places, strict=True)
        ]


def _named(tree) -> list[tuple[tuple[str, ...], Any]]:
    """(path, array) of every leaf, in leaf order; the path of a variable is its module's."""
    is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    return [
        (
            tuple(jax.tree_util.keystr((k,), simple=True) for k in keys),
            leaf.get_value() if is_variable(leaf) else leaf,
        )
        for keys, leaf in flat
    ]


def _nest(named) -> dict:
    """{"0": {"embedding": {"table": array}}} of (path, array) pairs."""
    tree: dict = {}
    for keys, leaf in named:
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return tree


def _at(tree: dict, keys: tuple[str, ...]):
    for key in keys:
        tree = tree[key]
    return tree


def _check(saved, wanted, where: str) -> None:
    """Compares the paths, shapes and types on disk with those of the plan."""
    found = dict(_walk(dict(saved)))
    lines = []
    for keys, leaf in wanted:
        have, path = found.pop(keys, None), ".".join(keys)
        want = f"{leaf.dtype}{list(leaf.shape)}"
        if have is None:
            lines.append(f"{path}: not saved, expected {want}")
        elif (tuple(have.shape), have.dtype) != (leaf.shape, leaf.dtype):
            lines.append(f"{path}: saved {have.dtype}{list(have.shape)}, expected {want}")
    lines += [
        f"{'.'.join(keys)}: saved {have.dtype}{list(have.shape)}, expected nothing"
        for keys, have in found.items()
    ]
    if lines:
        more = f" and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise ValueError(
            f"checkpoint {where} does not fit this model and optimizer: {'; '.join(lines[:8])}"
            f"{more}; restore it with the model and optimizer that it was saved with"
        )


def _walk(tree, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _walk(value, (*keys, key))
    else:
        yield keys, tree
