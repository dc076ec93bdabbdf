"""Packages that import their names when they are first used: code that only reads settings does not import torch."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for the package with this `__init__.py`.

    They provide the names that the file imports under `if TYPE_CHECKING:`, where type checkers read them, too.
    """
    where = dict(_named(ast.parse(Path(file).read_text(encoding="utf-8"))))

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, theirs = where[name]
        found = getattr(import_module(module), theirs)
        setattr(sys.modules[package], name, found)  # the next lookup finds it directly
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, names


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which takes a sixth of the time in which torch and transformers are imported.

    It does not look at what was made meanwhile later either: for a command, whose process ends soon.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _named(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for block in tree.body:
        match block:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
                for statement in body:
                    if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                        for alias in statement.names:
                            yield alias.asname or alias.name, (statement.module, alias.name)
