"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["wrong", "doubtful", "fine"]


@dataclass(frozen=True)
class Finding:
    severity: Severity
    """wrong: training will fail; doubtful: it may, or will be slow; fine: as it should be."""
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
