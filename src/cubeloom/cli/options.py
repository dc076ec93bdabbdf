"""Configures tyro for a command, from the dataclass of its options."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from cubeloom.base.settings.describe import meanings

_WORDS = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}


def classes(kind: Any) -> Iterator[type]:
    """The dataclass of a command, or those of its subcommands."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
    elif get_origin(kind) is Annotated:
        yield from classes(get_args(kind)[0])
    else:
        for each in get_args(kind):
            yield from classes(each)


def described(kind: Any) -> Any:
    """The same command with readable help: no `{None}|INT`, no line breaks from the source."""
    if get_origin(kind) is Annotated:
        base, *more = get_args(kind)
        return Annotated[described(base), *more]
    if get_origin(kind) in (Union, types.UnionType):
        return reduce(or_, map(described, get_args(kind)))
    hints = get_type_hints(kind, include_extras=True)
    told = {name: text for each in reversed(kind.__mro__) for name, text in _told(each).items()}
    fields = [(each.name, _annotated(hints[each.name], told.get(each.name)), each) for each in dataclasses.fields(kind)]
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), namespace=names, frozen=True, kw_only=True)


def names(kind: Any) -> Iterator[str]:
    """The long names of all options."""
    for each in classes(kind):
        hints = get_type_hints(each, include_extras=True)
        for field in dataclasses.fields(each):
            yield f"--{field.name.replace('_', '-')}"
            for said in getattr(hints[field.name], "__metadata__", ()):
                yield from getattr(said, "aliases", None) or ()


def _told(kind: type) -> dict[str, str]:
    return meanings(kind) if dataclasses.is_dataclass(kind) else {}


def _annotated(hint: Any, meaning: str | None) -> Any:
    metavar = None if any(getattr(each, "metavar", None) for each in getattr(hint, "__metadata__", ())) else word(hint)
    return Annotated[hint, tyro.conf.arg(metavar=metavar, help=meaning, help_behavior_hint=_default)]


def word(hint: Any) -> str | None:
    """The placeholder of a value in the help; None if tyro's own is right."""
    if get_origin(hint) is Annotated:
        return word(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        return word(rest[0]) if len(rest) == 1 else None
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    return _WORDS.get(hint)


def _default(text: str) -> str:
    """Only meaningful defaults: the text of an option says what happens if it is not given."""
    return "" if text in ("None", "(default: None)", "False", "(default: False)") else f"(default: {text})"
