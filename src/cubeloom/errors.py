"""What a user did wrong, as opposed to what we did wrong."""


class UserError(ValueError):
    """Input that cannot work. The message says what, where, what is legal and what is nearest; commands exit 2 with it."""
