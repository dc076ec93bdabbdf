"""Cubeloom: train neural networks that are too large for one device."""

from typing import TYPE_CHECKING, Any

from cubeloom.base.errors import UserError as UserError
from cubeloom.base.grid import Grid as Grid

if TYPE_CHECKING:
    from cubeloom.parallel.foreign import cut as cut

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`cut` is imported when it is first asked for: it needs torch, which schedules and drawings do without."""
    if name != "cut":
        raise AttributeError(f"module 'cubeloom' has no attribute {name!r}")
    from cubeloom.parallel.foreign import cut

    return cut
