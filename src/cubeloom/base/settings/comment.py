"""Writes a settings file for a person to edit: some settings have values, and all others are comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from cubeloom.base.settings.describe import Section, Setting, sections
from cubeloom.base.settings.write import value_text

_WIDTH = 100


def commented(kind: type, values: Mapping[str, Any], head: str) -> str:
    """`values`: by setting name, such as rate.peak; a list of tables is a list of mappings."""
    lines = [f"# {head}"]
    for section in sections(kind):
        if not section.name.endswith("[]"):
            lines += ["", *_section(section, values)]
    return "\n".join(lines) + "\n"


def _section(section: Section, values: Mapping[str, Any]) -> Iterator[str]:
    yield from _comment(section.meaning)
    if section.name:
        yield section.title
    for each in section.settings:
        name = each.name.rpartition(".")[2]
        yield ""
        yield from _comment(_meaning(each))
        if each.name in values:
            yield f"{name} = {_value(values[each.name])}"
        else:
            yield f"# {name} = {'' if each.default is None else each.default}".rstrip()


def _meaning(each: Setting) -> str:
    return f"{each.meaning} ({', '.join(each.choices)})" if each.choices else each.meaning


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _value(value: Any) -> str:
    """A value as TOML, also a list of tables."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {_value(each)}' for name, each in value.items())} }}"
    return value_text(value)
