"""The settings file that runs a plan: `cubeloom train FILE`."""

from __future__ import annotations

import json

from cubeloom.base.errors import UserError
from cubeloom.parallel.config import WEIGHTS
from cubeloom.plan.cost_model.recompute import RECOMPUTE
from cubeloom.plan.hardware import Dtype
from cubeloom.plan.search.answer import Answer
from cubeloom.plan.search.found import Plan

DTYPES: dict[Dtype, str] = {"bf16": "bfloat16", "fp32": "float32"}
"""What a job calls the numbers that plans are for."""


def planned_dtype(name: str) -> Dtype:
    """The planner's name of a job's dtype."""
    found = {long: short for short, long in DTYPES.items()}
    if name not in found:
        raise UserError(f"dtype = {name!r}: plans are for {' and '.join(found)}")
    return found[name]


def configuration(answer: Answer, plan: Plan) -> str:
    """TOML. What it does not say keeps its default."""
    if answer.dtype not in DTYPES:
        raise UserError(f"a job trains in {' or '.join(DTYPES)}, and the plan is for {answer.dtype}")
    grid, shape = plan.grid, plan.shape
    schedule = {"name": shape.name, "microbatches": plan.microbatches}
    if shape.name.startswith("chimera"):
        schedule |= {"pairs": shape.pairs} | ({"mode": shape.mode} if shape.mode else {})
    sections: dict[str, dict[str, object]] = {
        "model": {"preset" if answer.model.planes is None else "name": answer.model.name},
        "batch": {"samples": answer.task.samples, "sequence": answer.task.sequence},
        "grid": {**grid.sizes, "placement": list(grid.placement)},
        "schedule": {**schedule, "sync": "eager"},
        "layout": {
            "activations": "sharded" if plan.sharded else "replicated",
            "weights": WEIGHTS[plan.weights],
            "inputs": "regathered" if plan.regathered else "kept",
            "ways": plan.ways,
            "recompute": RECOMPUTE[plan.recompute],
            "gradients": answer.task.gradients,
        },
        "optimizer": {"shard_optimizer_state": True},
    }
    if answer.task.precision != "model":
        sections["layout"]["precision"] = answer.task.precision
    if answer.task.record and plan.recordable:
        sections["layout"]["record"] = True
    kind = answer.cluster.device.kind
    lines = [f'dtype = "{DTYPES[answer.dtype]}"', *([] if kind is None else [f'device = "{kind}"'])]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)
