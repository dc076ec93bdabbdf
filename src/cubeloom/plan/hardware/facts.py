"""A number with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from cubeloom.base.errors import UserError

Confidence = Literal["measured", "published", "estimated"]
CONFIDENCES = get_args(Confidence)


@dataclass(frozen=True)
class Fact:
    value: float
    source: str
    confidence: Confidence
    scatter: float | None = None  # of a measured number: one standard deviation of what was measured, as a share


def number(least: float = 0.0, default: Any = MISSING) -> Any:
    """A field of a device or cluster that its file gives as a fact, at least as large as `least`."""
    return field(default=default, metadata={"least": least})


def numbers(kind: type) -> dict[str, Any]:
    """The fields of a kind that are facts in its file, by name."""
    return {each.name: each for each in fields(kind) if "least" in each.metadata}


def read(kind: type, table: Mapping[str, Any], where: str) -> dict[str, Fact]:
    """The facts of this kind in a table of a file; refused with the name of what is missing, unknown or not a number."""
    wanted = numbers(kind)
    found = {}
    for name, wish in wanted.items():
        if name in table:
            found[name] = _fact(table[name], wish.metadata["least"], f"{where}: {name}")
        elif wish.default is MISSING:
            raise UserError(f"{where} does not say {name}; it has to give {', '.join(wanted)}")
    return found


def _fact(given: Any, least: float, where: str) -> Fact:
    if not isinstance(given, Mapping) or set(given) - {"scatter"} != {"value", "source", "confidence"}:
        raise UserError(f"{where} should read {{ value = …, source = '…', confidence = '…' }}, got {given!r}")
    value, source, confidence = given["value"], given["source"], given["confidence"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where}: value = {value!r} is not a number")
    if not least <= value < float("inf"):
        raise UserError(f"{where}: value = {value!r} should be a finite number of at least {least:g}")
    if not isinstance(source, str) or not source.strip():
        raise UserError(f"{where}: source = {source!r} should say where the number comes from")
    if confidence not in CONFIDENCES:
        raise UserError(f"{where}: confidence = {confidence!r}; it is one of {', '.join(CONFIDENCES)}")
    scatter = given.get("scatter")
    if scatter is not None and (isinstance(scatter, bool) or not isinstance(scatter, int | float) or scatter < 0):
        raise UserError(f"{where}: scatter = {scatter!r} should be a share, from 0 up")
    return Fact(value, source, confidence, scatter)
