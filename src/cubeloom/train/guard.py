"""Steps that cannot be right: found by the norm of their gradient, which all ranks have to the bit, and skipped by all."""

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
    """`norms` are those of the last steps, which a checkpoint keeps."""

    def __init__(self, settings: GuardSettings, norms: Iterable[float] = ()) -> None:
        self._settings = settings
        self.norms = deque(norms, WINDOW)
        self._skipped = 0  # in a row

    @property
    def limit(self) -> float:
        """The largest norm with which the next step may update anything."""
        spike = self._settings.spike
        if spike is None or len(self.norms) < WINDOW:
            return sys.float_info.max
        return min(spike * median(self.norms), sys.float_info.max)

    def objection(self, norm: float) -> str | None:
        """Why a step with a gradient of this norm must not have updated anything; None if it may have.

        A loss that is no number has a gradient that is none either, so that the norm alone tells.
        """
        found = self._find(norm)
        self._skipped = self._skipped + 1 if found else 0
        if found is None:
            self.norms.append(norm)
        elif self._skipped >= self._settings.most:
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
