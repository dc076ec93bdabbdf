"""What a user did wrong, as opposed to what we did wrong; and what is said of it, in one line."""


class UserError(ValueError):
    """Input that cannot work. The message says what, where, what is legal and what is nearest; commands exit 2 with it."""


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def first_line(error: BaseException) -> str:
    """An error's first words, without the advice and stacks that may follow; its type's name where it has none."""
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__)
