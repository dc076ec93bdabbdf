"""Schedules as CSV, one row per worker as torch writes them, and as JSON with the simulator's figures."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.pipeline.action import Kind
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.schedule import Schedule, parse_row
from cubeloom.pipeline.simulator import simulate


def to_csv(schedule: Schedule, name_row: bool = True) -> str:
    """One row per worker. The row `# name` keeps the name; without it torch's pipelining can also read the file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([str(action) for action in row] for row in schedule.workers)
    if name_row:
        writer.writerow([f"# {schedule.name}"])
    return text.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Empty cells are bubbles, as in torch's files. The numbers of stages and micro-batches follow from the actions."""
    rows = []
    for cells in csv.reader(io.StringIO(text)):
        if cells and cells[0].startswith("#"):
            name = cells[0].lstrip("# ").strip()
        else:
            rows.append(parse_row(cell for cell in cells if cell.strip()))
    actions = [action for row in rows for action in row]
    if not actions:
        raise UserError(
            "a schedule's CSV has one row for each worker, for instance 0F0,0F1,0B0,0B1; this has no action"
        )
    stages = 1 + max(action.stage for action in actions)
    microbatches = 1 + max(action.microbatch for action in actions if action.kind is not Kind.REDUCE)
    return Schedule(name, stages, microbatches, tuple(rows))


def as_dict(schedule: Schedule, costs: Costs | None = None) -> dict[str, Any]:
    timeline = simulate(schedule, costs)
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "workers": [[str(action) for action in row] for row in schedule.workers],
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble_ratio": list(timeline.bubble_ratio),
        "peak_activations": list(timeline.peak_activations),
        "weight_copies": timeline.weight_copies,
    }


def to_json(schedule: Schedule, costs: Costs | None = None) -> str:
    return json.dumps(as_dict(schedule, costs))


def from_json(text: str) -> Schedule:
    """Reads the schedule only: name, stages, microbatches and workers."""
    try:
        data = json.loads(text)
        rows = tuple(parse_row(row) for row in data["workers"])
        return Schedule(str(data["name"]), int(data["stages"]), int(data["microbatches"]), rows)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'a schedule\'s JSON has "name", "stages", "microbatches" and "workers"; this one fails at {error}'
        ) from None
