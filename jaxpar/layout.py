"""A layout says where everything lives on the mesh, and nothing about the model.

One frozen dataclass, written in Python or in TOML; it refuses what cannot work before anything
compiles. This module imports no JAX.
"""

import dataclasses
import difflib
import functools
import math
import tomllib
from collections.abc import Callable, Iterable

AXES = ("pipe", "replica", "data", "expert", "context", "tensor")
"""Mesh axes, outermost first: the fastest links go to the innermost axes."""

BATCH_AXES = ("replica", "data", "expert")
"""The axes that the rows of a batch are split over."""

ZERO_AXES = ("data", "expert", "context")
"""The axes that ZeRO shards the state of dense parameters over."""

CHOICES = {
    "remat": ("none", "dots", "block", "stage", "offload"),
    "precision": ("bf16", "fp32"),
    "attention": ("ring", "ulysses", "allgather", "ring+ulysses"),
    "context_order": ("zigzag", "contiguous", "document"),
    "idle": ("auto", "skip", "compute"),
    "zero": (0, 1, 2, 3),
}


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns `known` as a readable list, after the nearest word to `word` where one is near.

    >>> nearest("tensr", ["data", "tensor"])
    "did you mean 'tensor'? known: data, tensor"
    """
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known) or 'none'}"


def ring_and_ulysses(
    size: int, attention: str, ulysses: int, axis: str = "context"
) -> tuple[int, int]:
    """How many of the `size` devices of `axis` form a ring, and how many exchange heads.

    `ulysses` 0: not said; (size, 1) then for ring+ulysses. Raises ValueError for one that does not
    fit.

    >>> ring_and_ulysses(8, "ring+ulysses", 2)
    (4, 2)
    """
    if attention != "ring+ulysses":
        if ulysses > 1:
            raise ValueError(
                f"ulysses={ulysses} needs attention='ring+ulysses', and attention is "
                f"{attention!r}; use that or leave ulysses out"
            )
        return (1, size) if attention == "ulysses" else (size, 1)
    if size == 1:
        return 1, 1
    fits = [u for u in range(2, size) if size % u == 0]
    if not fits or ulysses not in (0, *fits):
        use = f"ulysses={' or '.join(map(str, fits))}" if fits else "ring or ulysses"
        raise ValueError(
            f"attention='ring+ulysses' splits {axis}={size} into ring x ulysses, both above 1, "
            f"and ulysses={ulysses} does not; use {use}"
        )
    return size // max(ulysses, 1), max(ulysses, 1)


def _checked_names(cls):
    """Makes an unknown keyword a sentence that lists the known ones."""
    original = cls.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        if args:
            raise ValueError("a Layout takes keywords only; write Layout(data=4, tensor=2)")
        fields = [f.name for f in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in fields:
                raise ValueError(f"a layout has no setting {name!r}; {nearest(name, fields)}")
        original(self, **kwargs)

    cls.__init__ = init
    return cls


@_checked_names
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model, its optimizer state and its batches are laid out on a device mesh.

    Axis sizes are numbers of devices along that axis; one of them may be -1 and then takes what
    is left (`fill`). `microbatches` is how many parts the rows of one device group are worked
    through in. Raises ValueError for anything that cannot work on any mesh.

    >>> Layout(data=4, tensor=2).num_devices
    8
    """

    pipe: int = 1
    replica: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 1
    schedule: str | Callable = "1f1b"
    microbatches: int = 1
    chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    remat: str = "none"
    precision: str = "bf16"
    sequence_parallel: bool = True
    attention: str = "ring"
    context_order: str = "zigzag"
    ulysses: int = 0
    expert_axes: tuple[str, ...] = ("expert",)
    idle: str = "auto"

    def __post_init__(self):
        for name in ("expert_axes", "layers_per_stage"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in (*AXES, "microbatches", "chunks"):
            self._check_size(name)
        open_axes = [a for a in AXES if getattr(self, a) == -1]
        if len(open_axes) > 1:
            raise ValueError(
                f"{' and '.join(f'{a}=-1' for a in open_axes)}: only one axis can take the devices "
                f"that are left; give a size for {' or '.join(open_axes)}"
            )
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or value not in choices:
                raise ValueError(
                    f"{name}={value!r} is not a choice; {nearest(value, map(str, choices))}"
                )
        if not isinstance(self.sequence_parallel, bool):
            raise ValueError(
                f"sequence_parallel={self.sequence_parallel!r} is neither true nor false"
            )
        for axis in self.expert_axes:
            if axis not in AXES:
                raise ValueError(f"expert_axes names an axis {axis!r}; {nearest(axis, AXES)}")
        self._check_context()

    def _check_context(self):
        if type(self.ulysses) is not int or self.ulysses < 0:
            raise ValueError(
                f"ulysses={self.ulysses!r} is not a number of devices; use 2 or more, or 0 for as "
                "many as the model's heads allow"
            )
        if self.context == -1:
            return
        ring_and_ulysses(self.context, self.attention, self.ulysses)
        if self.circulates and self.pipe > 1 and self.idle == "skip":
            raise ValueError(
                f"idle='skip' with pipe={self.pipe} and attention={self.attention!r}: a stage that "
                "skips would leave out permutations over context that others wait for; use "
                "idle='auto', or attention='allgather' or 'ulysses'"
            )

    @property
    def circulates(self) -> bool:
        """Whether keys and values circulate over `context` by permutations."""
        return self.context > 1 and self.attention in ("ring", "ring+ulysses")

    @property
    def computes_idle(self) -> bool:
        """Whether stages that have nothing to do compute all the same, and drop it.

        Permutations must run on all devices alike, so with a ring they do.
        """
        return self.idle == "compute" or self.circulates and self.pipe > 1

    @property
    def sequence_multiple(self) -> int:
        """What the sequence must be a multiple of, for every device to hold the same."""
        parts = self.context * (self.tensor if self.sequence_parallel else 1)
        ring, _ = ring_and_ulysses(self.context, self.attention, self.ulysses)
        return math.lcm(parts, 2 * ring if self.context_order == "zigzag" and ring > 1 else 1)

    def _check_size(self, name: str):
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and (value >= 1 or (value == -1 and name in AXES)):
            return
        fill = ", or -1 for the devices that are left" if name in AXES else ""
        raise ValueError(f"{name}={value!r} is not a size; use a whole number from 1 up{fill}")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> number of devices, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        """The product of all axis sizes."""
        return math.prod(self.axis_sizes.values())

    def size(self, axes: Iterable[str]) -> int:
        """Product of the sizes of `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    def present(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of `axes` that have more than one device, in the order given."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    def fill(self, num_devices: int) -> "Layout":
        """Gives an axis of size -1 the devices that are left, and checks the product.

        Raises ValueError when the axes do not multiply to `num_devices`.

        >>> Layout(data=-1, tensor=2).fill(8).data
        4
        """
        open_axes = [axis for axis in AXES if getattr(self, axis) == -1]
        named = {a: n for a, n in self.axis_sizes.items() if n not in (1, -1)}
        product = math.prod(named.values())
        words = " x ".join(f"{a}={n}" for a, n in named.items()) or "one device"
        if open_axes and num_devices % product == 0:
            return dataclasses.replace(self, **{open_axes[0]: num_devices // product})
        if not open_axes and product == num_devices:
            return self
        divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
        raise ValueError(
            f"{words} = {product} devices, found {num_devices}; the axis sizes must multiply to "
            f"{num_devices}, so each must be one of {', '.join(map(str, divisors))}"
        )

    def to_toml(self) -> str:
        """The settings that differ from the defaults, as TOML."""
        import tomli_w

        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        if callable(values.get("schedule")):
            raise ValueError("a layout with a schedule function of your own has no TOML form")
        return tomli_w.dumps({k: list(v) if isinstance(v, tuple) else v for k, v in values.items()})

    @classmethod
    def from_toml(cls, text: str, source: str = "the layout") -> "Layout":
        """Reads a layout from TOML text; `source` names it in errors."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{source} is not TOML: {error}") from None
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
