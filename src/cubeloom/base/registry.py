"""Values by name: presets, optimizers, losses, sources of data, schedules. A user's own is named `file.py:function`."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from cubeloom.base.errors import UserError

T = TypeVar("T")
OWN = "file.py:function"


@dataclass(frozen=True)
class Lazy:
    """An entry that is imported when it is looked up, as `package.module:name`. Names alone then need no torch."""

    where: str


class Registry(Mapping[str, T], Generic[T]):
    """The values of one kind by name, in order. `find` also takes a user's own, if there can be such (`functions`)."""

    def __init__(self, what: str, entries: Mapping[str, T | Lazy], functions: bool = False) -> None:
        """`what` the values are, for errors."""
        self.what, self.functions = what, functions
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        return _imported(entry.where) if isinstance(entry, Lazy) else entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def choices(self) -> tuple[str, ...]:
        return (*self, OWN) if self.functions else tuple(self)

    def find(self, name: str) -> T:
        """The value of this name. The file of `file.py:function` is executed. Raises UserError with the nearest name."""
        own = own_function(name) if self.functions else None
        if own is not None:
            return cast(T, function_of(*own))
        self.check(name)
        return self[name]

    def check(self, name: str, where: str = "") -> None:
        """Raises UserError for a name that `find` does not know; neither imports nor executes. `where` it is said."""
        if name in self or (self.functions and own_function(name) is not None):
            return
        said = f"{where} = {name!r}: unknown {self.what}" if where else f"unknown {self.what} {name!r}"
        raise UserError(f"{said}{nearest(name, self)} There are {', '.join(self.choices)}")


def named(registry: Registry[Any], default: str | None = None) -> Any:
    """A field of settings whose value is a name in the registry. Reading settings checks it, and their pages list it."""
    return field(default=default, metadata={"registry": registry})


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {str(near[0])!r}?" if near else "."


def own_function(name: str) -> tuple[str, str] | None:
    """File and function of `file.py:function`; None for any other name. Raises UserError if there is no such file."""
    file, _, function = name.rpartition(":")
    if name.endswith(".py"):
        raise UserError(f"{name!r}: say which function of the file, as {name}:build")
    if not file.endswith(".py"):
        return None
    if not Path(file).is_file():
        raise UserError(f"{name!r}: there is no file {file}")
    return str(Path(file).resolve()), function


def function_of(file: str, function: str) -> Any:
    """A function of a user's file, which is executed once."""
    module = executed(file)
    found = getattr(module, function, None)
    if not callable(found):
        own = {name: each for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
        known = [name for name, each in own.items() if callable(each) and not name.startswith("_")]
        raise UserError(f"{file} has no function {function!r}{nearest(function, known)} It has {', '.join(known)}")
    return found


@cache
def executed(file: str) -> ModuleType:
    """A user's file as a module."""
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"there is no file {file}")
    name = f"cubeloom_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _imported(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
