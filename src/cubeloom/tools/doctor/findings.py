"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["wrong", "doubtful", "fine"]


@dataclass(frozen=True)
class Finding:
    severity: Severity
    """wrong: training will fail; doubtful: it may fail or be slow; fine: no problem."""
    subject: str
    what: str
    remedy: str = ""
    """What to do about it."""


def wrong(subject: str, what: str, remedy: str) -> Finding:
    return Finding("wrong", subject, what, remedy)


def doubtful(subject: str, what: str, remedy: str) -> Finding:
    return Finding("doubtful", subject, what, remedy)


def fine(subject: str, what: str) -> Finding:
    return Finding("fine", subject, what)
