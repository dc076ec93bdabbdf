"""Why one plan is faster than another, and why a decomposition lost."""

from __future__ import annotations

from dataclasses import dataclass

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.plan.search.answer import Answer, search
from cubeloom.plan.search.found import Plan

_TERMS = (("computed", "computation"), ("bubble", "bubble"), ("exposed", "exposed communication"))


def why(better: Plan, worse: Plan) -> str:
    """In which terms the better one is faster, the largest first, and what it pays for that."""
    said = [f"{abs(gain):.3g} s {'less' if gain > 0 else 'more'} {word}" for word, gain in gains(better, worse).items()]
    return ", ".join(said) or "all terms within 0.2 %"


def gains(better: Plan, worse: Plan) -> dict[str, float]:
    """Seconds that the better one saves, by term, the largest first; without those within 0.2 %."""
    saved = {word: getattr(worse, term) - getattr(better, term) for term, word in _TERMS}
    least = 0.002 * better.seconds
    return {word: gain for word, gain in sorted(saved.items(), key=lambda item: -abs(item[1])) if abs(gain) > least}


@dataclass(frozen=True)
class Explanation:
    """Of one grid: its best plan, or why it has none."""

    grid: Grid
    best: Plan
    own: Plan | None
    refused: dict[str, int]

    @property
    def text(self) -> str:
        if self.own is None:
            reasons = [f"  {count} settings: {reason}" for reason, count in self.refused.items()]
            return "\n".join([f"{self.grid} cannot run. Of its settings were refused:", *reasons])
        lines = [f"{'':28}{'this':>12}{'the best':>12}"]
        lines += [f"{'grid':28}{self.own.grid!s:>12}  {self.best.grid}"]
        lines += [f"{'schedule':28}{self.own.shape.title:>12}  {self.best.shape.title}"]
        for term, word in (("seconds", "step"), *_TERMS):
            lines.append(f"{word + ', s':28}{getattr(self.own, term):12.4f}{getattr(self.best, term):12.4f}")
        for name in self.own.memory:
            lines.append(f"{name + ', GB':28}{self.own.memory[name] / 1e9:12.2f}{self.best.memory[name] / 1e9:12.2f}")
        if self.own.seconds <= self.best.seconds:
            return "\n".join([*lines, f"{self.grid} wins."])
        slower = self.own.seconds / self.best.seconds - 1
        return "\n".join([*lines, f"{self.grid} loses by {slower:.1%}; the best has {why(self.best, self.own)}."])


def explain(answer: Answer, grid: Grid) -> Explanation:
    """Look for the best plan on this grid alone."""
    task = answer.task
    if grid.world != task.devices:
        raise UserError(f"the grid {grid} has {grid.world} devices, and the plan is for {task.devices}")
    if not answer.plans:
        raise UserError("no decomposition can run, so that there is none to compare with; see what was refused")
    own = search(
        answer.model, answer.cluster, task.devices, task.samples, task.sequence if answer.model.tokens else None,
        answer.dtype, only=grid, reserve=task.reserve, record=task.record, precision=task.precision,
    )  # fmt: skip
    best = answer.plans[0]
    return Explanation(grid, best, own.plans[0] if own.plans else None, dict(own.refused))
