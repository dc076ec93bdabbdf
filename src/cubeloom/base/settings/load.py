"""Reads settings: a TOML file and those it extends, or a Python recipe; then overrides such as `training.steps=100`."""

from __future__ import annotations

import dataclasses
import runpy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from cubeloom.base.errors import UserError
from cubeloom.base.settings.convert import convert

T = TypeVar("T")
Values = dict[str, Any]


def load(kind: type[T], file: Path, overrides: Iterable[str] = ()) -> T:
    """The settings of a file, as a frozen dataclass of this kind.

    A TOML file may begin with `extends = "base.toml"`, a path relative to it, and then contains only the differences. A
    Python recipe sets `settings`, a nested dict or an instance of the kind; a section of the dict may also be an
    instance.

    A kind may define other names of its settings (`SHORT`, such as lr for rate.peak), and a section a short form that
    its `values_of` parses (`grid = "x=2,y=2"`).
    """
    values = _recipe(kind, file) if file.suffix == ".py" else _toml(kind, file)
    values = _merged(kind, {}, values)
    for override in overrides:
        values = _merged(kind, values, _override(override))
    try:
        return convert(kind, values)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _toml(kind: type, file: Path, inside: tuple[Path, ...] = ()) -> Values:
    file = file.resolve()
    if file in inside:
        circle = " -> ".join(each.name for each in (*inside, file))
        raise UserError(f"settings extend each other in a circle: {circle}")
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no settings at {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"settings at {file} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not TOML: {error}") from None
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UserError(f"{file}: extends = {base!r} should be the name of a file")
    return _merged(kind, _toml(kind, file.parent / base, (*inside, file)), values)


def _recipe(kind: type[T], file: Path) -> Values:
    if not file.exists():
        raise UserError(f"no settings at {file}")
    try:
        made = runpy.run_path(str(file)).get("settings")
    except Exception as error:
        raise UserError(f"the recipe {file} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, (kind, Mapping)):
        raise UserError(f"the recipe {file} does not set `settings` to a {kind.__name__} or a dict")
    plain: Values = _plain(made)
    return plain


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, as in a file, so that overrides reach into sections."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _override(text: str) -> Values:
    """`a.b=c`, with c parsed as TOML, otherwise as text."""
    path, equals, value = text.removeprefix("--").partition("=")
    if not equals or not all(path.split(".")):
        raise UserError(f"an override reads a.b=c, got {text!r}")
    try:
        read = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        read = value
    return _nested(path, read)


def _nested(path: str, value: Any) -> Values:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def _merged(kind: Any, base: Values, above: Mapping[str, Any]) -> Values:
    """Merge section by section; other values are replaced. Of settings with the same meaning (`ALIKE`) the later
    counts.
    """
    above = _in_full(kind, above)
    alike = getattr(kind, "ALIKE", ())
    merged = {key: value for key, value in base.items() if key not in alike or above.keys().isdisjoint(alike)}
    kinds = get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
    for key, value in above.items():
        before, section = merged.get(key), kinds.get(key)
        if isinstance(value, str) and (values_of := getattr(section, "values_of", None)) is not None:
            value = values_of(value)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(section):
            merged[key] = _merged(section, dict(before) if isinstance(before, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _in_full(kind: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """With other names of settings (`SHORT`) replaced by their own."""
    short = {name: path for name, path in getattr(kind, "SHORT", {}).items() if name in values}
    if not short:
        return values
    found = {name: value for name, value in values.items() if name not in short}
    for name, path in short.items():
        section, _, field = path.rpartition(".")
        if field in found.get(section, {}):
            raise UserError(f"{name} and {path} say the same: give one of them")
        found = _merged(kind, found, _nested(path, values[name]))
    return found
