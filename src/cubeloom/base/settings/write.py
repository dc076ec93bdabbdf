"""Writes all settings as TOML, so that resolved settings can be stored with a run and loaded again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


def write(settings: Any) -> str:
    """The text of a file that `load` reads as an equal value. None is left out, because that is what unset means."""
    return "\n".join(_section(settings, "")) + "\n"


def _section(settings: Any, path: str) -> list[str]:
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    lines = [
        f"{name} = {value_text(value)}"
        for name, value in values.items()
        if not _is_section(value) and value is not None
    ]
    for name, value in values.items():
        if _is_section(value):
            lines += ["", f"[{path}{name}]", *_section(value, f"{path}{name}.")]
    return lines


def _is_section(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def value_text(value: Any) -> str:
    """A value as in a file."""
    match value:
        case bool():
            return str(value).lower()
        case str() | Path():
            # JSON's escapes are valid in TOML; only DEL has none in JSON.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return f"[{', '.join(map(value_text, value))}]"
        case _ if _is_section(value):
            return f"{{{', '.join(_section(value, ''))}}}"  # in a list, sections are inline tables
        case float():
            return repr(value)
    return str(value)
