"""What a request asks for: the values of its query, checked."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TypeVar

from cubeloom.base.errors import UserError

T = TypeVar("T", int, float)


class Query(Mapping[str, str]):
    """Text by name. What a page leaves empty counts as not given."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name: value.strip() for name, value in given.items() if value.strip()}

    def __getitem__(self, name: str) -> str:
        return self._given[name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def whole(self, name: str, default: int) -> int:
        return self._number(int, name, default, "a whole number")

    def real(self, name: str, default: float) -> float:
        value = self._number(float, name, default, "a number")
        if not isfinite(value):
            raise UserError(f"{name} is {self[name]!r}: give a finite number")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of these; the first by default."""
        value = self.get(name, choices[0])
        if value not in choices:
            raise UserError(f"{name} is {value!r}: it is one of {', '.join(choices)}")
        return value

    def _number(self, kind: type[T], name: str, default: T, what: str) -> T:
        if name not in self:
            return default
        try:
            return kind(self[name])
        except ValueError:
            raise UserError(f"{name} is {self[name]!r}: give {what}") from None
