"""Learning rates over the steps of a run: a warm-up, followed by one of a few shapes. Pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cubeloom.base.errors import UserError, counted
from cubeloom.base.limits import within

Decay = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """From 0 to `peak` over `warmup` steps, then down to `floor` at the last step.

    A floor of 0 is reached one step after the last, because a step with rate 0 would train nothing.

    - `constant`: stays at the peak;
    - `linear`, `cosine`: fall from the end of the warm-up on;
    - `wsd` (warm-up, stable, decay): stays at the peak until the last `cooldown` of the steps, then falls linearly.
    """

    peak: float
    steps: int
    warmup: int = 0
    decay: Decay = "cosine"
    floor: float = 0.0
    cooldown: float = 0.2  # share of all steps, for wsd

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.peak:
            raise UserError(f"a learning rate cannot fall from rate.peak = {self.peak} to rate.floor = {self.floor}")
        within("steps", self.steps)
        if not 0 <= self.warmup <= self.steps:
            raise UserError(f"rate.warmup = {self.warmup}: it does not fit into {counted(self.steps, 'step')}")
        if not 0 < self.cooldown <= 1:
            raise UserError(f"rate.cooldown is a share of the steps, above 0 and at most 1, got {self.cooldown}")

    def __call__(self, step: int) -> float:
        """The rate of step 0, 1, …; later steps have the rate of the last one."""
        step = min(step, self.steps - 1)
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        start = self.warmup
        if self.decay == "wsd":
            start = max(start, self.steps - math.ceil(self.cooldown * self.steps))
        done = max(0.0, (step - start + 1) / (self.steps - start + (self.floor == 0)))
        match self.decay:
            case "constant":
                share = 1.0
            case "cosine":
                share = (1 + math.cos(math.pi * done)) / 2
            case "linear" | "wsd":
                share = 1 - done
        return self.floor + (self.peak - self.floor) * share
