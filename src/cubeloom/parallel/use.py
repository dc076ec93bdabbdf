"""The uses of a parameter in graphs whose backward has not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn


class Use:
    """One use of a parameter in a forward. It ends with its node's backward, or with a graph without a backward."""

    __slots__ = ("_counted", "_ended", "_parameter", "_uses")

    def __init__(
        self,
        uses: Counter[nn.Parameter],
        parameter: nn.Parameter,
        ended: Callable[[nn.Parameter], None],
        counted: bool,
    ) -> None:
        self._uses, self._parameter, self._ended, self._counted = uses, parameter, ended, counted
        uses[parameter] += counted

    def done(self) -> None:
        """The backward has handed over this use's gradient. A second backward through a graph ends no use."""
        if self._counted:
            self._counted = False
            self._ended(self._parameter)

    def __del__(self) -> None:
        if self._counted:
            self._uses[self._parameter] -= 1


class EndOfBackward:
    """Called by autograd when a backward ends. It exists as long as autograd's own task."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __call__(self) -> None:
        self._ended()
