"""The settings of a training run: one frozen dataclass, from flags, from TOML or from Python.

The one idea: what a run is, is written down. A config makes the model, the layout, the optimizer
and the documents, and `to_toml` is enough to repeat the run.
"""

import dataclasses
import importlib
import pkgutil
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints

from jaxpar.layout import Layout, nearest
from jaxpar.layout_files import load_layout, override

DEFAULT_LAYOUT = "cpu8_pipe2_data2_tensor2"
"""The layout of a run on emulated devices that names none."""

LEAST = {
    "steps": 1,
    "global_batch": 1,
    "seq_len": 1,
    "devices": 0,
    "seed": 0,
    "warmup_steps": -1,
    "eos": -1,
    "eval_every": 0,
    "eval_rows": 0,
    "checkpoint_every": 0,
    "weight_decay": 0,
    "clip_norm": 0,
}
"""The smallest value of a setting."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Trains a language model with the layout you choose, and leaves runs/NAME behind.

    Without flags it trains llama:tiny on 8 emulated CPU devices, on the source text of Python's
    standard library, in about a minute. On a machine with GPUs it uses them. --config FILE repeats
    a run from its config.toml; flags after it change settings.
    """

    model: str = "llama:tiny"
    """FAMILY:PRESET, such as llama:8b or gpt2:124m."""
    layout: str = "auto"
    """Name of a layout of mesh_configs/, or the path of a TOML file. auto: on GPUs all of them on
    the data axis, on CPUs a small default."""
    set: tuple[str, ...] = ()
    """KEY=VALUE, a field of the layout to change, such as tensor=4 or remat=block."""
    devices: int = 0
    """Emulate this many CPU devices. 0: use the GPUs there are, or as many CPU devices as the
    layout needs."""
    xla_options: Literal["overlap", "none"] = "overlap"
    """On GPUs, the preset of XLA options (jaxpar.cluster.options) to compile the step with."""
    data: str = "builtin"
    """builtin, or a file or folder of text, .jsonl, .npy or .bin."""
    tokenizer: str = "bytes"
    """bytes, or the path of a Hugging Face tokenizer.json."""
    token_dtype: str = "uint16"
    """Type of the ids in .bin files."""
    eos: int = -1
    """The token id that ends a document; -1: none."""
    holdout: float = 0.05
    """Share of the documents that is held out for evaluation."""
    steps: int = 300
    """Optimizer steps, in all."""
    global_batch: int = 8
    """Rows of a batch, over all devices and microbatches."""
    seq_len: int = 128
    """Tokens of a row."""
    seed: int = 0
    """Of the parameters and the order of the data."""
    lr: float = 3e-3
    """Highest learning rate."""
    warmup_steps: int = -1
    """Steps in which the learning rate rises; -1: a tenth of all."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up: down to a tenth, or constant."""
    weight_decay: float = 0.1
    """On matrices; never on biases and norm scales."""
    b1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    b2: float = 0.95
    """AdamW's decay of the mean of squares."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0: never."""
    skip_nonfinite: bool = False
    """Leave out a step whose loss or gradient is not finite, instead of ending the run."""
    eval_every: int = 0
    """Steps between evaluations on held-out rows; 0: only at the end."""
    eval_rows: int = 256
    """Held-out rows of an evaluation at most; 0: all."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    name: str = ""
    """Name of the run; by default that of the model. A number is added where it is taken."""
    out: str = ""
    """Folder of the run; by default runs/NAME. It must be new or empty."""
    resume: str = ""
    """Folder of a run to go on with, from its last checkpoint, with its settings."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run's folder."""
    wandb: bool = False
    """Also log to Weights & Biases."""

    def __post_init__(self):
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _typed(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
        for name, least in LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}={getattr(self, name)} is too small; use {least} or more")
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
        for name in ("b1", "b2", "holdout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves nothing of {self.steps} "
                f"steps; use at most {self.steps - 1}, or more steps"
            )
        if self.out and self.resume:
            raise ValueError(
                f"out {self.out} and resume {self.resume} both name the run's folder; "
                "a resumed run goes on in its own, so leave out `out`"
            )

    @property
    def warmup(self) -> int:
        """Steps of warm-up: `warmup_steps`, or a tenth of all."""
        return self.steps // 10 if self.warmup_steps < 0 else self.warmup_steps

    def to_toml(self) -> str:
        """All settings but the folder's, as TOML; paths are written whole."""
        import tomli_w

        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("out", "resume")
        }
        for name in ("data", "tokenizer"):
            if Path(values[name]).exists():
                values[name] = str(Path(values[name]).absolute())
        return tomli_w.dumps({k: list(v) if isinstance(v, tuple) else v for k, v in values.items()})

    @classmethod
    def from_toml(cls, path: str | Path, **changes) -> "TrainConfig":
        """Reads settings from a TOML file; a layout that lies beside it is read from there.

        Raises ValueError for a file that is missing or no TOML, and for unknown or wrong settings.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no config {path}; give the path of a TOML file")
        try:
            values = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(
                    f"{path} sets {name!r}, which is not known; {nearest(name, names)}"
                )
        layout = path.parent / str(values.get("layout", "auto"))
        if layout.suffix == ".toml" and layout.is_file():
            values["layout"] = str(layout)
        try:
            return cls(**{**values, **changes})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def resolve_layout(self, on_gpus: bool) -> Layout:
        """The layout with the changes of `set`; an axis may still be -1."""
        if self.layout != "auto":
            layout = load_layout(self.layout)
        elif on_gpus or self.devices not in (0, load_layout(DEFAULT_LAYOUT).num_devices):
            layout = Layout(data=-1)
        else:
            layout = load_layout(DEFAULT_LAYOUT)
        return override(layout, self.set)

    def optimizer(self):
        """(AdamW as an optax transformation, its learning rate as a function of the step).

        Decoupled weight decay (arXiv 1711.05101) on matrices only; clipping is the train step's.
        """
        import optax

        from jaxpar.nn.params import decay_mask

        start = self.lr / (self.warmup + 1)
        if self.schedule == "constant":
            rate = optax.schedules.warmup_constant_schedule(start, self.lr, self.warmup)
        else:
            rate = optax.schedules.warmup_cosine_decay_schedule(
                start, self.lr, self.warmup, self.steps, self.lr / 10
            )
        tx = optax.adamw(
            rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=decay_mask
        )
        return tx, rate


def _typed(name: str, value: Any, hint) -> Any:
    """`value` as the type of a setting; ints are floats too, lists are tuples."""
    choices = get_args(hint) if hint not in (str, int, float, bool) else ()
    if name == "set":
        if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
            return tuple(value)
        raise ValueError(f"set={value!r} is not a list of texts such as 'tensor=4'")
    if choices:
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not a choice; {nearest(value, choices)}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kind = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ValueError(f"{name}={value!r} is not {kind[hint]}")
    return value


def model_families() -> list[str]:
    """Names of the modules of `jaxpar.models` that have presets."""
    folder = importlib.import_module("jaxpar.models").__path__
    names = [info.name for info in pkgutil.iter_modules(folder)]
    return [n for n in names if hasattr(importlib.import_module(f"jaxpar.models.{n}"), "PRESETS")]


def load_model(name: str) -> tuple[ModuleType, Any]:
    """(module, config) of a model by its name FAMILY:PRESET.

    Raises ValueError for a family or preset that does not exist, naming the nearest.

    >>> load_model("llama:tiny")[1].vocab_size
    256
    """
    family, colon, preset = name.partition(":")
    families = model_families()
    if family not in families:
        raise ValueError(f"there is no model family {family!r}; {nearest(family, families)}")
    module = importlib.import_module(f"jaxpar.models.{family}")
    if not colon:
        raise ValueError(
            f"model {name!r} names no preset; write {family}:PRESET, with one of "
            f"{', '.join(module.PRESETS)}"
        )
    return module, module.preset(preset)
