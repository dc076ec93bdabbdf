"""A plan as JSON: strategies side by side, where time and memory go, and the settings file of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cubeloom.base.pages import self_contained
from cubeloom.pipeline import Costs, simulate
from cubeloom.pipeline.drawing.view import view as drawn
from cubeloom.plan.report.words import details, sentence
from cubeloom.plan.search import Answer, Plan, configuration, different, gains, usual_names, usual_one
from cubeloom.plan.search.refine import stage_costs
from cubeloom.plan.simulate import schedule_of

_FORWARDS = 256  # that a timeline shows, but two rounds of micro-batches at least
_ACTIONS = 3000  # of a timeline of any but the best plan


def page(answer: Answer, others: Sequence[Answer] = ()) -> str:
    """A self-contained page. `others`: answers for other numbers of devices."""
    seen = view(answer)
    beside = [compared(answer, name) for name in seen["compared"]]
    return self_contained("plan", seen["title"], {**seen, "usual": beside, "scaling": scaling([answer, *others])})


def view(answer: Answer) -> dict[str, Any]:
    return {
        "title": f"{answer.model.name} on {answer.task.devices:,} devices of {answer.cluster.name}",
        "model": answer.model.name,
        "cluster": answer.cluster.name,
        "devices": answer.task.devices,
        "samples": answer.task.samples,
        "sequence": answer.task.sequence,
        "dtype": answer.dtype,
        "unit": "tokens" if answer.model.tokens else "samples",
        "capacity": answer.cluster.device.memory,
        "room": answer.task.room(answer.cluster),
        "device": answer.cluster.device.name,
        "considered": answer.considered,
        "seconds": answer.seconds,
        "sentence": sentence(answer, answer.plans[0]) if answer.plans else "",
        "plans": [_entry(answer, "", plan) for plan in different(answer)],
        "compared": usual_names(answer) if answer.plans else [],
        "refused": dict(answer.refused),
    }


def compared(answer: Answer, name: str) -> dict[str, Any]:
    """A strategy that many would take, which a search of its own finds; or why it cannot run."""
    found = usual_one(answer, name)
    return {"label": name, "why": found.refused} if found.plan is None else _entry(answer, name, found.plan)


def scaling(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The best plan for each number of devices."""
    return [_best(each) for each in sorted(answers, key=lambda each: each.task.devices)]


def _entry(answer: Answer, label: str, plan: Plan) -> dict[str, Any]:
    best = answer.plans[0]
    entry = answer.entry(plan)
    return {
        **entry,
        "label": label,
        "name": str(plan.grid),
        "details": details(plan),
        "time": {"computation": plan.computed, "bubble": plan.bubble, "exposed communication": plan.exposed},
        "slower": plan.seconds / best.seconds - 1,
        "saves": {} if plan is best else gains(best, plan),  # seconds that the best saves
        "settings": configuration(answer, plan),
        "timeline": _timeline(answer, plan),
    }


def _timeline(answer: Answer, plan: Plan) -> dict[str, Any] | None:
    """As `cubeloom schedule` draws it, in seconds; of a long one the first micro-batches. None where there is none."""
    if plan.grid.pipe == 1:
        return None
    rounds = max(_FORWARDS // plan.grid.pipe**2, 2)
    count = min(plan.microbatches, rounds * plan.grid.pipe)
    schedule = schedule_of(plan.shape, plan.grid.pipe, count)
    if plan is not answer.plans[0] and len(list(schedule.actions)) > _ACTIONS:
        return None
    costs = Costs(*stage_costs(answer.model, answer.cluster, answer.task, answer.dtype, plan))
    cut = f"the first {count} of {plan.microbatches} micro-batches, " if count < plan.microbatches else ""
    return drawn(simulate(schedule, costs), f"{cut}without reductions and the update", "s")


def _best(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {"devices": answer.task.devices}
    if answer.plans:
        plan = answer.plans[0]
        found |= {"name": str(plan.grid), "schedule": plan.shape.title, "step_s": plan.seconds}
        found |= {"per_second": answer.per_second(plan), "mfu": answer.mfu(plan)}
    return found
