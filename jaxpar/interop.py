"""Weights of Hugging Face models in and out of jaxpar's models.

The one idea: both sides hold the same numbers, so loading is a walk over the table of
`jaxpar.families`: transpose, cut apart, stack the layers; saving is the same walk backwards. Rotary
pairs are (i, i + H/2) on both sides, so no rows of query and key are permuted.
"""

import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.families import (
    Family,
    Row,
    config_from_hugging_face,
    config_to_hugging_face,
    find_family,
)

__all__ = [
    "FileTensor",
    "config_from_hugging_face",
    "config_to_hugging_face",
    "from_hugging_face",
    "load_hugging_face",
    "load_safetensors_folder",
    "to_hugging_face",
]

MAX_LINES = 12
"""Tensors that an error lists before it counts the rest."""


def from_hugging_face(tensors: Mapping[str, Any], config, family: str) -> nnx.Module:
    """A model of `jaxpar.models.<family>` of this config with these weights, as fp32 numpy arrays.

    `config` is what `config_from_hugging_face` gives, `family` the `model_type` of config.json.
    Raises what `load_hugging_face` raises.

    >>> from jaxpar.models import gpt2
    >>> model = gpt2.Model(gpt2.tiny(), rngs=nnx.Rngs(0))
    >>> copy = from_hugging_face(to_hugging_face(model), gpt2.tiny(), "gpt2")
    >>> copy.positions.shape
    (1024, 64)
    """
    find_family(family, "there is no family")
    module = importlib.import_module(f"jaxpar.models.{family}")
    init = lambda key: module.Model(config, rngs=nnx.Rngs(key))  # noqa: E731
    return load_hugging_face(jax.eval_shape(init, jax.random.key(0)), tensors)


def load_hugging_face(model: nnx.Module, tensors: Mapping[str, Any]) -> nnx.Module:
    """`model` with the weights of a Hugging Face model, as fp32 numpy arrays in canonical order.

    `model` gives structure and shapes and may be abstract (`jax.eval_shape`). Values of `tensors`
    are numpy arrays, or have a `shape` and become one when numpy asks, as those of
    `load_safetensors_folder`; they are read one at a time. Put the result on a mesh with
    `jax.device_put(plan.stored(model), plan.shardings)`.

    Raises ValueError that lists every missing, unexpected and misshapen tensor, or names a tensor
    of a type that fp32 does not hold exactly.

    >>> from jaxpar.models import llama
    >>> model = llama.Model(llama.tiny(), rngs=nnx.Rngs(0))
    >>> tensors = to_hugging_face(model) | {"model.norm.weight": np.full(64, 2.0, np.float32)}
    >>> float(load_hugging_face(model, tensors).norm.scale[0])
    2.0
    """
    table, leaves = _take_apart(model)
    tensors = _full_names(tensors, table)
    _check(leaves, tensors, table)
    values = {}
    for name, row, layer in _rows(leaves, table):
        array = _fp32(tensors[name], name)
        array = array.T if _turned(row, table) else array
        ends = np.cumsum([row.flat(_shape(leaves, path))[-1] for path in row.params])[:-1]
        for path, piece in zip(row.params, np.split(array, ends, axis=-1), strict=True):
            if path not in values:
                values[path] = np.empty(leaves[path].shape, np.float32)
            values[path][... if layer is None else layer] = piece.reshape(_shape(leaves, path))
    keys, tree = jax.tree_util.tree_flatten_with_path(model)
    return tree.unflatten([values[_path(k)] for k, _ in keys])


def to_hugging_face(model: nnx.Module) -> dict[str, np.ndarray]:
    """The weights of a model in canonical order, with the names and shapes of Hugging Face files.

    Give `plan.canonical(model)` of a model on a mesh. Loading the result gives the same bits; tied
    models have no lm_head. Raises ValueError for parameters that the family has no place for.

    >>> from jaxpar.models import llama
    >>> tensors = to_hugging_face(llama.Model(llama.tiny(), rngs=nnx.Rngs(0)))
    >>> tensors["model.layers.3.self_attn.k_proj.weight"].shape
    (32, 64)
    """
    table, leaves = _take_apart(model)
    arrays = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    out = {}
    for name, row, layer in _rows(leaves, table):
        parts = [arrays[path] if layer is None else arrays[path][layer] for path in row.params]
        whole = np.concatenate([p.reshape(row.flat(p.shape)) for p in parts], axis=-1)
        out[name] = np.ascontiguousarray(whole.T if _turned(row, table) else whole)
    for name in _zero_biases(leaves, table):
        out[name] = np.zeros(leaves["norm.scale"].shape, np.float32)
    return out


def _take_apart(model: nnx.Module) -> tuple[Family, dict[str, Any]]:
    """The table of the module that the model's class is of, and path -> parameter (or its shape).

    Refuses a model with parameters that the table does not have.
    """
    module = type(model).__module__.rpartition(".")[2]
    table = find_family(module, f"{type(model).__name__} has no table of names: it is of module")
    leaves = {_path(k): leaf for k, leaf in jax.tree_util.tree_flatten_with_path(model)[0]}
    homeless = sorted(set(leaves) - {path for row in table.rows for path in row.params})
    if homeless:
        raise ValueError(
            f"{table.architecture} of transformers has no {', '.join(homeless)}; use "
            "a config without these parameters"
        )
    return table, leaves


def _path(keys) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".").removesuffix(".value")


def _is_stacked(row: Row) -> bool:
    return "{}" in row.name


def _turned(row: Row, table: Family) -> bool:
    return table.outputs_first and row.kind != "same" and row.name.endswith("weight")


def _num_layers(leaves: Mapping[str, Any]) -> int:
    return next(leaf.shape[0] for path, leaf in leaves.items() if path.startswith("layers."))


def _shape(leaves: Mapping[str, Any], path: str) -> tuple[int, ...]:
    """A parameter's shape without the layers dim."""
    shape = tuple(leaves[path].shape)
    return shape[1:] if path.startswith("layers.") else shape


def _rows(leaves: Mapping[str, Any], table: Family) -> Iterator[tuple[str, Row, int | None]]:
    """(name, row, layer) of every tensor that holds parameters of the model."""
    for row in table.rows:
        if all(path in leaves for path in row.params):
            for layer in range(_num_layers(leaves)) if _is_stacked(row) else [None]:
                yield row.name.format(layer), row, layer


def _expected_shape(leaves: Mapping[str, Any], row: Row, table: Family) -> tuple[int, ...]:
    flats = [row.flat(_shape(leaves, path)) for path in row.params]
    shape = (*flats[0][:-1], sum(flat[-1] for flat in flats))
    return shape[::-1] if _turned(row, table) else shape


def _zero_biases(leaves: Mapping[str, Any], table: Family) -> list[str]:
    """Tensors that the family has, and our model computes without: biases that must be 0."""
    rows = [row for row in table.rows if row.params[0] in table.zeros]
    rows = [r for r in rows if r.params[0] not in leaves and table.zeros[r.params[0]] in leaves]
    return [row.name.format(layer) for row in rows for layer in range(_num_layers(leaves))]


def _full_names(tensors: Mapping[str, Any], table: Family) -> dict[str, Any]:
    """The weights under full names, also where a file holds the decoder without its head."""
    prefix = "" if any(name.startswith(table.prefix) for name in tensors) else table.prefix
    return {
        name if name.startswith("lm_head.") else prefix + name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(table.buffers)
    }


def _check(leaves: Mapping[str, Any], tensors: Mapping[str, Any], table: Family) -> None:
    """Compares names and shapes of the tensors with those that the model needs."""
    lines, left = [], dict(tensors)
    for name, row, layer in _rows(leaves, table):
        want, found = _expected_shape(leaves, row, table), left.pop(name, None)
        where = f"{name} -> {', '.join(row.params)}{'' if layer is None else f' of layer {layer}'}"
        if found is None:
            lines.append(f"{where}: missing, expected {list(want)}")
        elif tuple(found.shape) != want:
            lines.append(f"{where}: found {list(found.shape)}, expected {list(want)}")
    for name in _zero_biases(leaves, table):
        if name in left and np.any(_fp32(left.pop(name), name)):
            lines.append(f"{name}: a bias that is not 0, which the model does not add")
    head, embedding = left.pop("lm_head.weight", None), tensors.get(table.rows[0].name)
    if head is not None and embedding is not None:
        if not np.array_equal(np.asarray(head), np.asarray(embedding)):
            lines.append(f"lm_head.weight: differs from {table.rows[0].name}, to which it is tied")
    lines += [f"{name}: found {list(a.shape)}, expected nothing" for name, a in left.items()]
    if lines:
        more = f"; and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
        raise ValueError(
            f"the tensors do not fit the model: {'; '.join(lines[:MAX_LINES])}{more}; "
            "make the model from the config.json that belongs to them"
        )


def _fp32(tensor, name: str) -> np.ndarray:
    array = np.asarray(tensor)
    if array.dtype not in (np.float32, np.float16, jnp.bfloat16):
        raise ValueError(
            f"{name} is of type {array.dtype}; fp32 holds float32, float16 and "
            "bfloat16 exactly, so convert it to one of these first"
        )
    return array.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor in a *.safetensors file that is read when numpy asks for it."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        with _safetensors().safe_open(self.file, framework="numpy") as opened:
            array = opened.get_tensor(self.name)
        return array if dtype is None else array.astype(dtype)


def load_safetensors_folder(folder: str | Path) -> dict[str, FileTensor]:
    """Name -> tensor of a model's folder; reads names and shapes now, numbers when they are used.

    Takes the files that model.safetensors.index.json names, or else the only *.safetensors file.
    Raises ValueError where a file is missing or several have no index, and where the safetensors
    library is not installed.

    >>> tensors = load_safetensors_folder("Llama-3.2-1B")  # doctest: +SKIP
    """
    library, names = _safetensors(), {}
    for file in _files(Path(folder)):
        with library.safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118
                shape = tuple(opened.get_slice(name).get_shape())
                names[name] = FileTensor(file, name, shape)
    return names


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / f for f in json.loads(index.read_text())["weight_map"].values()})
        missing = [f.name for f in files if not f.exists()]
        if missing:
            raise ValueError(
                f"{folder} has no {', '.join(missing)}, which {index.name} names; "
                "fetch the missing files"
            )
        return files
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(f.name for f in files) or "none"
        raise ValueError(
            f"{folder} has no {index.name}, so it must have one *.safetensors file; found {found}"
        )
    return files


def _safetensors():
    try:
        return importlib.import_module("safetensors")
    except ImportError:
        raise ValueError(
            "reading *.safetensors needs the package safetensors, which is not "
            "installed; run pip install safetensors"
        ) from None
