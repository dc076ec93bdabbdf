"""Packages that import what they name when it is first asked for: what only reads settings does not wait for torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of the package whose `__init__.py` this is.

    It gives the names that the file imports under `if TYPE_CHECKING:`, where type checkers read them, too.
    """
    where = dict(_named(ast.parse(Path(file).read_text(encoding="utf-8"))))

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, theirs = where[name]
        found = getattr(import_module(module), theirs)
        setattr(sys.modules[package], name, found)  # the next time Python finds it without asking
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, names


def _named(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for block in tree.body:
        match block:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
                for statement in body:
                    if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                        for alias in statement.names:
                            yield alias.asname or alias.name, (statement.module, alias.name)
