"""The answer to a question for a plan: the best decompositions, and how many were refused and why."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.base.limits import SAMPLES, within
from cubeloom.parallel.config import GradientDtype, Precision
from cubeloom.parallel.specs import fp8_layers
from cubeloom.parallel.volume import named
from cubeloom.plan.cost_model.recompute import RECOMPUTE
from cubeloom.plan.cost_model.volume import pipeline_bytes
from cubeloom.plan.hardware import Cluster, Dtype, cluster
from cubeloom.plan.hardware.device import SIZES
from cubeloom.plan.model import Model, load, with_stages
from cubeloom.plan.model.flops import flops
from cubeloom.plan.search.best import Tally
from cubeloom.plan.search.find import find
from cubeloom.plan.search.found import Plan
from cubeloom.plan.search.refine import SURE, placed, refined
from cubeloom.plan.search.space import Part, Task
from cubeloom.plan.simulate import schedule_of

KEEP = 200  # of the closed form's best, that are placed in every way and simulated


@dataclass(frozen=True)
class Answer:
    model: Model
    cluster: Cluster
    task: Task
    dtype: Dtype
    considered: int
    refused: Mapping[str, int]
    plans: tuple[Plan, ...]
    seconds: float

    def mfu(self, plan: Plan) -> float:
        """The model's own operations, over what the devices could have done in that time."""
        done = flops(self.model, self.task.sequence) * self.task.samples
        return done / (plan.seconds * self.task.devices * self.cluster.device.peak(self.dtype))

    def per_second(self, plan: Plan) -> float:
        """Tokens, or samples of images."""
        return self.task.samples * self.task.sequence / plan.seconds

    def bytes(self, plan: Plan, worker: int = 0, place: tuple[int, int] = (0, 0)) -> dict[str, Fraction]:
        """What a worker's ranks at this place of x and y receive in a step, by axis: exactly what their ledger counts."""
        schedule = schedule_of(plan.shape, plan.grid.pipe, plan.microbatches)
        s = plan.settings(self.task, number=Fraction)
        s = replace(s, coordinates={**s.coordinates, "x": Fraction(place[0]), "y": Fraction(place[1])})
        model = with_stages(self.model.on(plan.grid.x, plan.grid.y), schedule.stages)
        return named(pipeline_bytes(model, s, schedule, worker, plan.recompute).items(), s)

    def as_json(self, top: int) -> dict[str, Any]:
        return {
            "considered": self.considered,
            "seconds": round(self.seconds, 3),
            "plans": [self.entry(plan) for plan in self.plans[:top]],
            "refused": dict(self.refused),
        }

    def entry(self, plan: Plan) -> dict[str, Any]:
        """A plan as JSON has it."""
        return {
            "grid": plan.grid.sizes,
            "placement": ",".join(plan.grid.placement),
            "schedule": plan.shape.title,
            "microbatches": plan.microbatches,
            "microbatch": plan.microbatch,
            "rest": plan.rest,
            "ways": plan.ways,
            "recompute": RECOMPUTE[plan.recompute],
            "step_s": plan.seconds,
            "error_s": plan.error * plan.seconds,
            "per_second": self.per_second(plan),
            "mfu": self.mfu(plan),
            "memory_gb": plan.total_memory / 1e9,
            "memory": {name: round(size) for name, size in plan.memory.items()},
            "bytes": {axis: float(size) for axis, size in sorted(self.bytes(plan).items())},
            "bubble": plan.bubble / plan.seconds,
            "exposed_s": plan.exposed,
            "simulated": plan.simulated,
        }


def search(
    model: Model | str,
    machine: Cluster | str,
    devices: int,
    samples: int,
    sequence: int | None = None,
    dtype: Dtype = "bf16",
    only: Grid | None = None,
    keep: int = KEEP,
    reserve: float = 0.08,
    record: bool = False,
    gradients: GradientDtype = "float32",
    precision: Precision = "model",
) -> Answer:
    """The best plans for a step of `samples` on so many devices of a cluster; of all grids, or of one.

    With `record`, stages are CUDA graphs wherever they can be, and the host's time is no plan's concern there.
    """
    began = time.perf_counter()
    model = load(model) if isinstance(model, str) else model
    machine = cluster(machine) if isinstance(machine, str) else machine
    _check(model, machine, devices, samples, sequence, reserve)
    if precision == "fp8":
        _check_fp8(model, machine)
    item = SIZES[dtype]
    task = Task(samples, sequence or model.sequence, devices, item, reserve, record, gradients, precision)
    found, tally = candidates(model, machine, task, dtype, Part.on(only) if only else None, keep)
    plans = refined(model, machine, task, dtype, found, keep)
    refused = {reason: count for reason, count in tally.refused.most_common() if count}
    took = time.perf_counter() - began
    return Answer(model, machine, task, dtype, tally.considered, refused, tuple(plans), took)


def candidates(
    model: Model, machine: Cluster, task: Task, dtype: Dtype, only: Part | None, keep: int = KEEP
) -> tuple[list[Plan], Tally]:
    """The best plans by the closed form in their best placement, the best first: of as many decompositions as it takes.

    A decomposition is kept by a bound on its time, however it is placed. Once that of the last one kept is no less than the
    time of a plan, none of those left out is faster than this plan.
    """
    while True:
        found, tally = find(model, machine, task, dtype, keep, only)
        plans = placed(model, machine, task, dtype, found)
        shown = plans[:SURE]
        if len(found) < keep or shown[-1].closed <= found[-1].seconds:
            return plans, tally
        keep *= 4


def _check(model: Model, machine: Cluster, devices: int, samples: int, sequence: int | None, reserve: float) -> None:
    within("--devices", devices)
    within("--global-batch", samples, most=SAMPLES)
    if sequence is not None:
        within("--sequence", sequence)
    if devices > machine.devices:
        raise UserError(f"{machine.name} has {machine.devices} devices, and {devices} were asked for")
    if not 0 <= reserve < 1:
        raise UserError(f"reserve is a share of the memory, from 0 to below 1; got {reserve:g}")
    if sequence is not None and not model.tokens:
        raise UserError(f"{model.name} trains on images: leave out --sequence")
    if sequence is not None and sequence > model.sequence:
        raise UserError(f"a sequence of {sequence} tokens is too long: {model.name} has {model.sequence} positions")


def _check_fp8(model: Model, machine: Cluster) -> None:
    if not machine.device.fp8:
        raise UserError(f"{machine.name}: its device {machine.device.name} has no rate of FP8; use precision = model")
    if model.planes is not None:
        raise UserError(
            f"{model.name} has no written cut, and FP8 is for models that have one (docs/fp8.md); use precision = model"
        )
    if not any(fp8_layers(kind.layers) for kind in model.kinds):
        raise UserError(f"{model.name} has no linear on tokens before its output layer; use precision = model")


def on_devices(answer: Answer, devices: int) -> Answer:
    """The same question for another number of devices."""
    task = answer.task
    sequence = task.sequence if answer.model.tokens else None
    asked = answer.model, answer.cluster, devices, task.samples, sequence, answer.dtype
    return search(*asked, reserve=task.reserve, record=task.record, precision=task.precision)


def counts_that_work(answer: Answer, most: int = 2) -> list[int]:
    """Of an answer without plans: the nearest numbers of devices, of those with many divisors, on which the model can run."""
    devices = answer.task.devices
    round_numbers = {factor << power for factor in (1, 3) for power in range(answer.cluster.devices.bit_length())}
    near = sorted(
        (count for count in round_numbers if devices // 4 <= count <= min(4 * devices, answer.cluster.devices)),
        key=lambda count: abs(count - devices),
    )
    found = (count for count in near if count != devices and _runs(answer, count))
    return list(islice(found, most))


def _runs(answer: Answer, devices: int) -> bool:
    task = replace(answer.task, devices=devices)
    return bool(find(answer.model, answer.cluster, task, answer.dtype, 1, None)[0])
