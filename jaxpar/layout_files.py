"""Layouts by name, from `mesh_configs/` or a path, and with settings changed by KEY=VALUE."""

import dataclasses
import tomllib
from collections.abc import Iterable
from pathlib import Path

from jaxpar.layout import Layout, nearest


def layout_names() -> list[str]:
    """Names of the layouts that come with jaxpar (files of `mesh_configs/`)."""
    from importlib.resources import files

    folder = files("jaxpar.mesh_configs").iterdir()
    return sorted(Path(p.name).stem for p in folder if p.name.endswith(".toml"))


def load_layout(name: str | Path) -> Layout:
    """Loads a layout by its name in `mesh_configs/` or from the path of a TOML file.

    Raises ValueError for a name or path that does not exist, naming the nearest.

    >>> load_layout("cpu8_data4_tensor2").tensor
    2
    """
    from importlib.resources import files

    text_name = str(name)
    if text_name.endswith(".toml") or "/" in text_name:
        path = Path(text_name)
        if not path.is_file():
            raise ValueError(f"there is no layout file {text_name}; give a path that exists")
        return Layout.from_toml(path.read_text(), text_name)
    if text_name not in layout_names():
        raise ValueError(
            f"there is no layout {text_name!r} in mesh_configs; "
            f"{nearest(text_name, layout_names())}"
        )
    return Layout.from_toml(
        files("jaxpar.mesh_configs").joinpath(f"{text_name}.toml").read_text(), text_name
    )


def override(layout: Layout, settings: Iterable[str]) -> Layout:
    """Applies `key=value` strings (TOML values; bare words are strings) to a layout.

    >>> override(Layout(data=8), ["data=4", "tensor=2", "remat=block"]).remat
    'block'
    """
    changes = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not a setting; write key=value, such as tensor=2")
        try:
            changes[key.strip()] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            changes[key.strip()] = value.strip()
    current = {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}
    return Layout(**{**current, **changes})
