"""What is raised where another rank did not do its part."""

from __future__ import annotations

from cubeloom.base.errors import first_line


class CommunicationError(RuntimeError):
    """A communication that failed or took too long: says which, over which axis, with which ranks."""


def failed(about: str, error: RuntimeError) -> CommunicationError:
    """Of torch's error only the first words: what follows is advice of gloo's, and a stack of torch's."""
    return CommunicationError(f"{about}: {first_line(error).partition(' This is typically')[0]}")


def blames_others(error: BaseException) -> bool:
    """Whether it failed because another rank did not do its part."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CommunicationError):
            return True
        cause = cause.__cause__
    return False
