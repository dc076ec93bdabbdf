"""User errors, as opposed to our own, and their one-line messages."""


class UserError(ValueError):
    """Invalid input. The message says what, where, what is legal and what is nearest; commands exit 2 with it."""


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without advice and stack traces; its type's name if it has no message."""
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__)
