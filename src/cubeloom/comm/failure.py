"""Errors caused by another rank."""

from __future__ import annotations

from cubeloom.base.errors import first_line


class CommunicationError(RuntimeError):
    """A communication that failed or timed out: says which, over which axis, with which ranks."""


def failed(about: str, error: RuntimeError) -> CommunicationError:
    """Keeps only the first words of torch's error: the rest is advice from gloo, and a stack trace."""
    return CommunicationError(f"{about}: {first_line(error).partition(' This is typically')[0]}")


def blames_others(error: BaseException) -> bool:
    """Whether the error was caused by another rank."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CommunicationError):
            return True
        cause = cause.__cause__
    return False
