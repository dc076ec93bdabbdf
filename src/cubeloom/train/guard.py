"""Skips implausible steps on all ranks, recognised by their gradient norm, which is bit-equal on all ranks."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable
from statistics import median

from cubeloom.base.errors import UserError, counted
from cubeloom.train.job.settings import GuardSettings

WINDOW = 32  # norms that a spike is compared with


class Guard:
    """`norms`: those of the last steps, which a checkpoint stores."""

    def __init__(self, settings: GuardSettings, norms: Iterable[float] = ()) -> None:
        self._settings = settings
        self.norms = deque(norms, WINDOW)
        self._skipped = 0  # consecutive skips

    @property
    def limit(self) -> float:
        """The largest gradient norm with which the next step may update weights."""
        spike = self._settings.spike
        if spike is None or len(self.norms) < WINDOW:
            return sys.float_info.max
        return min(spike * median(self.norms), sys.float_info.max)

    def objection(self, norm: float) -> str | None:
        """Why a step with this gradient norm must be skipped; None if it may update.

        A NaN loss also has a NaN gradient, so the norm is sufficient.
        """
        found = self._find(norm)
        self._skipped = self._skipped + 1 if found else 0
        if found is None:
            self.norms.append(norm)
        elif self._skipped >= self._settings.max_consecutive_skips:
            raise UserError(
                f"{counted(self._skipped, 'step')} in a row had to be skipped, the last because {found}; "
                "lower rate.peak, or look at the data"
            )
        return found

    def _find(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if norm > self.limit:
            return f"the gradient norm {norm:.3g} is over {self._settings.spike:g} times its median {median(self.norms):.3g}"
        return None
