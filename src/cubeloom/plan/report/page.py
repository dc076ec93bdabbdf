"""A report that stands alone: ranking, break-downs as stacked bars, the best plan's timeline, other numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cubeloom.pipeline import Costs
from cubeloom.pipeline import simulate as simulated
from cubeloom.pipeline.drawing import to_svg
from cubeloom.plan.cost_model.recompute import RECOMPUTE
from cubeloom.plan.report.bars import Bar, stacked
from cubeloom.plan.search import Answer, Plan, why
from cubeloom.plan.search.refine import stage_costs
from cubeloom.plan.simulate import schedule_of

_SHOWN = 10
_MOST = 48  # micro-batches that a timeline shows
_STYLE = """
body { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #1c2733; margin: 2em; max-width: 1240px }
table { border-collapse: collapse } td, th { padding: 3px 12px 3px 0; text-align: right; white-space: nowrap }
td:first-child, th:first-child, .left { text-align: left } th { color: #5c6b7a; font-weight: 500 }
h2 { margin-top: 2em; font-size: 17px } svg { max-width: 100%; height: auto }
"""


def page(answer: Answer, others: Sequence[Answer] = ()) -> str:
    best = answer.plans[0]
    what = f"{answer.model.name} on {answer.task.devices} devices of {answer.cluster.name}"
    shown = answer.plans[:_SHOWN]
    parts = [
        f"<h1>{escape(what)}</h1>",
        f"<p>{answer.considered:,} decompositions of a batch of {answer.task.samples} samples were weighed in "
        f"{answer.seconds:.2f} s. The best takes {best.seconds:.4g} s ± {best.error:.0%} a step.</p>",
        "<h2>Ranking</h2>",
        _ranking(answer, shown),
        "<h2>Where the time goes, seconds of a step</h2>",
        stacked([_time(plan) for plan in shown]),
        "<h2>Where the memory goes, GB of a rank</h2>",
        stacked([Bar(_name(plan), {name: size / 1e9 for name, size in plan.memory.items()}) for plan in shown]),
        "<h2>The best plan's pipeline</h2>",
        _timeline(answer, best),
        "<h2>Other numbers of devices</h2>",
        _devices([answer, *others]),
        "<h2>What was refused</h2>",
        _table(("why", "decompositions"), [(reason, f"{count:,}") for reason, count in answer.refused.items()]),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(what)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _name(plan: Plan) -> str:
    return f"{plan.grid} {plan.shape.title}"


def _time(plan: Plan) -> Bar:
    return Bar(_name(plan), {"computed": plan.computed, "bubble": plan.bubble, "exposed communication": plan.exposed})


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _ranking(answer: Answer, plans: Sequence[Plan]) -> str:
    rows = []
    for place, plan in enumerate(plans):
        after = why(plan, answer.plans[place + 1]) if place + 1 < len(answer.plans) else ""
        rows.append(
            (
                str(plan.grid), ",".join(plan.grid.placement), plan.shape.title,
                f"{plan.microbatches} × {plan.microbatch}", plan.rest, str(plan.ways),
                RECOMPUTE[plan.recompute], f"{plan.seconds:.4g} ± {plan.error * plan.seconds:.2g}",
                f"{answer.per_second(plan):,.0f}", f"{answer.mfu(plan):.1%}", f"{plan.total_memory / 1e9:.1f}", after,
            )
        )  # fmt: skip
    unit = "tokens" if answer.model.tokens else "samples"
    heads = (
        "grid",
        "placement",
        "schedule",
        "micro-batches",
        "rest",
        "ways",
        "recompute",
        "step, s",
        f"{unit}/s",
        "MFU",
    )
    return _table((*heads, "GB", "than the next"), rows)


def _timeline(answer: Answer, plan: Plan) -> str:
    """As `cubeloom schedule` draws it, in seconds; of a long one the first micro-batches."""
    if plan.grid.pipe == 1:
        return f"<p>One worker: {plan.microbatches} micro-batches one after the other.</p>"
    count = min(plan.microbatches, max(_MOST // plan.grid.pipe, 2) * plan.grid.pipe)
    schedule = schedule_of(plan.shape, plan.grid.pipe, count)
    forward, input_grad, weight_grad, message = stage_costs(
        answer.model, answer.cluster, answer.task, answer.dtype, plan
    )
    costs = Costs(forward, input_grad, weight_grad, message)
    note = f"{count} of {plan.microbatches} micro-batches" if count < plan.microbatches else ""
    return to_svg([simulated(schedule, costs)], [note])


def _devices(answers: Sequence[Answer]) -> str:
    rows = []
    for each in sorted(answers, key=lambda answer: answer.task.devices):
        if not each.plans:
            rows.append((str(each.task.devices), "none can run", "", "", "", ""))
            continue
        best = each.plans[0]
        rows.append(
            (
                str(each.task.devices), str(best.grid), best.shape.title, f"{best.seconds:.4g}",
                f"{each.per_second(best):,.0f}", f"{each.mfu(best):.1%}",
            )
        )  # fmt: skip
    return _table(("devices", "best grid", "schedule", "step, s", "a second", "MFU"), rows)
