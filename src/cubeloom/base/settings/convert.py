"""Converts the values of a file to a frozen dataclass. Errors say where, what is legal and what is nearest."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cubeloom.base import dtypes
from cubeloom.base.errors import UserError
from cubeloom.base.registry import nearest

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}


def convert(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """`where`: the dotted path so far."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UserError(_unknown(f"{where}{key}", key, list(fields)))
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{where}{missing[0]} is not set, and has no default")
    hints = get_type_hints(kind)
    found = {
        name: typed(hints[name], _with_defaults(fields[name], value), f"{where}{name}")
        for name, value in values.items()
    }
    for name, value in found.items():
        registry = fields[name].metadata.get("registry")
        if registry is not None and value is not None:
            registry.check(value, f"{where}{name}")
    return kind(**found)


def _with_defaults(field: dataclasses.Field[Any], value: Any) -> Any:
    """A section whose fields have no defaults of their own, such as `batch`, has those that its owner gives it."""
    if not isinstance(value, Mapping) or field.default_factory is dataclasses.MISSING:
        return value
    default = field.default_factory()
    if not dataclasses.is_dataclass(default):
        return value
    needed = [
        each.name for each in dataclasses.fields(default) if each.default is each.default_factory is dataclasses.MISSING
    ]
    return {**{name: getattr(default, name) for name in needed}, **value}


def _unknown(path: str, key: str, known: list[str]) -> str:
    return f"unknown setting {path}{nearest(key, known)} There are {', '.join(known)}"


def typed(kind: Any, value: Any, where: str) -> Any:
    """The value with the annotated type. `where`: its name in errors."""
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            first = next(iter(dataclasses.fields(kind))).name
            raise UserError(
                f"{where} is a section of settings, and got {value!r}; set one of its fields, as {where}.{first}"
            )
        return convert(kind, value, f"{where}.")
    if origin is Literal:
        known = get_args(kind)
        if value not in known and isinstance(value, str):
            value = dtypes.full_name(value)
        if value not in known:
            raise UserError(_choice(where, value, [str(each) for each in known]))
        return value
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), value, where)
    if origin is tuple:
        return _tuple(get_args(kind), value, where)
    return _plain(kind, value, where)


def _choice(where: str, value: object, known: list[str]) -> str:
    near = difflib.get_close_matches(str(value), known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{where} = {value!r} is none of {', '.join(known)}{hint}"


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """The first type that fits. TOML has no null: None means a setting that was not given, or that a recipe set so."""
    if value is None and type(None) in kinds:
        return None
    wanted = [kind for kind in kinds if kind is not type(None)]
    for kind in wanted[:-1]:
        try:
            return typed(kind, value, where)
        except UserError:
            continue
    return typed(wanted[-1], value, where)


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{where} = {value!r} should be a list")
    each = kinds[0]
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(typed(each, item, f"{where}[{place}]") for place, item in enumerate(value))
    if len(value) != len(kinds):
        raise UserError(f"{where} = {value!r} should have {len(kinds)} entries")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(typed(kind, item, f"{where}[{place}]") for place, (kind, item) in pairs)


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UserError(f"{where} = {value!r} should be {_WORDS.get(kind, getattr(kind, '__name__', str(kind)))}")
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise UserError(f"{where} = {value} does not fit into 64 bits")
    if type(value) is float and not isfinite(value):
        raise UserError(f"{where} = {value} is not a finite number")
    return kind(value) if kind is float else value
