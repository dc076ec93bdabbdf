"""Describes all settings: each field of a settings dataclass with its type, default, choices and meaning.

The meaning is the string below the field in its class, which editors also show.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cubeloom.base.settings.write import value_text

_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}


@dataclass(frozen=True)
class Setting:
    """One setting."""

    name: str
    """With its sections, as `rate.peak`; in a list of tables, as `data.sources[].folder`."""
    type: str
    default: str | None
    """As in a file; None if there is no default."""
    choices: tuple[str, ...]
    meaning: str

    @property
    def values(self) -> str:
        """Its choices if there are any, otherwise its type."""
        return " | ".join(self.choices) or self.type


@dataclass(frozen=True)
class Section:
    name: str
    """Empty for settings above all sections."""
    meaning: str
    settings: tuple[Setting, ...]

    @property
    def title(self) -> str:
        """As in a file."""
        return f"[{self.name}]" if self.name else "above all sections"


def sections(kind: type, name: str = "", default: Any = None) -> list[Section]:
    """The sections of a dataclass and of its dataclass fields. `default`: an instance of it, if there is one."""
    hints, told = get_type_hints(kind), meanings(kind)
    plain, below = [], []
    for field in dataclasses.fields(kind):
        path = f"{name}.{field.name}" if name else field.name
        hint = _without_none(hints[field.name])
        item = _item(hint)
        if _is_section(hint):
            below += sections(hint, path, _default(field, default))
            continue
        value = _default(field, default)
        shown = None if value is None else value_text(value)
        plain.append(Setting(path, _type(hint), shown, _choices(field, hint), told.get(field.name, "")))
        if _is_section(item):
            below += sections(item, f"{path}[]")
    return [Section(name, _first_paragraph(kind), tuple(plain)), *below]


def all_settings(kind: type) -> Iterator[Setting]:
    for section in sections(kind):
        yield from section.settings


@cache
def meanings(kind: type) -> dict[str, str]:
    """The string below each field, in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _first_paragraph(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _default(field: dataclasses.Field[Any], section: Any) -> Any:
    """From the section's default instance, otherwise the field's own; None if there is none."""
    if section is not None:
        return getattr(section, field.name)
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return None if value is MISSING else value


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    rest = [each for each in get_args(hint) if each is not type(None)]
    return rest[0] if len(rest) == 1 else hint


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _item(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is tuple else None


def _choices(field: dataclasses.Field[Any], hint: Any) -> tuple[str, ...]:
    if (registry := field.metadata.get("registry")) is not None:
        return tuple(registry.choices)
    return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "text"
    if get_origin(hint) is tuple:
        item, *more = get_args(hint)
        word = "table" if _is_section(item) else _type(item)
        return f"list of {word}s" if more == [...] else f"{1 + len(more)} {word}s"
    return _WORDS.get(hint, str(hint))
