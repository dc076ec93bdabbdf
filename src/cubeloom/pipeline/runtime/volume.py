"""The closed form for a pipeline: bytes that a rank receives in one step, from the schedule and the sizes alone."""

from __future__ import annotations

from fractions import Fraction

from cubeloom.base.grid import Grid
from cubeloom.parallel.amounts import Summed, Volume, Words, add, gradient_volume, sum_volume
from cubeloom.parallel.cut import GradientDtype
from cubeloom.parallel.forms import Batch, LossForm
from cubeloom.parallel.image_forms import SquaredLossForm
from cubeloom.parallel.key_values import copies_volume
from cubeloom.parallel.volume import gradients, pass_volume
from cubeloom.pipeline import Kind, programme
from cubeloom.pipeline.memory import versions
from cubeloom.pipeline.messages import Receive, Step
from cubeloom.pipeline.runtime.build import Layout
from cubeloom.pipeline.runtime.microbatches import portions

_DOUBLE = Words(8)  # losses and counts are summed in float64


def pipeline_volume(
    layout: Layout,
    grid: Grid,
    batch: Batch,
    item: int,
    rank: int,
    gradients_in: GradientDtype = "float32",
    zero: bool = False,
) -> Volume:
    """One step of this rank, without recomputation. `zero` as in `step_volume`."""
    here = grid.coordinates(rank)
    words = Words(item, gradients_in)
    schedule = layout.schedule
    cut = portions(schedule)
    small = Batch(batch.samples // len(cut), batch.sequence)
    held = schedule.held_by(here["pipe"])
    moved: list[Volume] = []
    summed: dict[str, Summed] = {}
    for replica, stage in held:
        passes = sum(schedule.assignment[microbatch] == replica for microbatch, _ in cut)
        gathers = Fraction(_kept_gathers(layout, here["pipe"], replica, stage), passes)
        for form in layout.forms_of(stage):
            once = pass_volume(form, grid, small, words, here, gathers)
            moved.append({axis: passes * size for axis, size in once.items()})
            summed |= gradients(form, grid)
    updates = 1 + schedule.groups[-1]
    for name, part in summed.items():
        once = gradient_volume(part, grid, words, len(layout.holders(name)), zero)
        moved.append({axis: updates * size for axis, size in once.items()})
    forms = [form for _, stage in held for form in layout.forms_of(stage)]
    once = copies_volume(forms, grid, words, here, zero, layout.holders)
    moved.append({axis: updates * size for axis, size in once.items()})
    if any(stage == schedule.stages - 1 for _, stage in held):
        losses = sum(isinstance(form, LossForm | SquaredLossForm) for form in layout.forms_of(schedule.stages - 1))
        moved += losses * [sum_volume(Summed(Fraction(len(cut)), ("data", "z")), grid, _DOUBLE)]
    moved.append(sum_volume(Summed(Fraction(1), ("pipe",)), grid, _DOUBLE))
    moved += [{"pipe": _numbers(layout, step, grid, small) * item} for step in programme(schedule)[here["pipe"]]]
    return add(*moved)


def _numbers(layout: Layout, step: Step, grid: Grid, batch: Batch) -> Fraction:
    """Of what a rank receives."""
    if not isinstance(step, Receive):
        return Fraction(0)
    what, stage, *_ = step.message.token
    # The gradient of a stage's input is as large as the output of the stage before.
    return sum(
        (each.numbers(grid, batch) for each in layout.handed_by(stage if what == "F" else stage - 1)), Fraction(0)
    )


def _kept_gathers(layout: Layout, worker: int, replica: int, stage: int) -> int:
    """How often a weight that is kept from forward to backward is gathered.

    Whenever none of its portions is in flight, and where the one at hand has other values: of an older version, or before
    an update.
    """
    used = versions(layout.schedule, worker)
    gathers = flying = 0
    gathered: int | None = None  # the version
    for action in layout.schedule.workers[worker]:
        if (action.replica, action.stage) != (replica, stage):
            continue
        if action.kind is Kind.UPDATE:
            gathered = None
        elif action.kind is Kind.FORWARD or action.makes_input_grad:
            version = used[replica, stage, action.microbatch]
            gathers += gathered != version
            flying += 1 if action.kind is Kind.FORWARD else -1
            gathered = version if flying else None
    return gathers
