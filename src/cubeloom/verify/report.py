"""Compare a grid with the serial model, and say what came out."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from fractions import Fraction

import torch

from cubeloom.comm import devices
from cubeloom.comm.ledger import plain
from cubeloom.cube import step_volume
from cubeloom.launch import RankPool
from cubeloom.metrics.record import finite
from cubeloom.models.weights import check_weights
from cubeloom.runtime.volume import pipeline_volume
from cubeloom.verify.experiment import Experiment
from cubeloom.verify.runs import Outcome, grid_run, no_less_than_nan, serial_run
from cubeloom.verify.stale import stale_run

# The largest relative difference that arithmetic in another order may make over a few steps. In float64 it is far below;
# in the others gradients and weights agree to a few units of their own rounding.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Report:
    experiment: Experiment
    serial_losses: list[float]
    losses: list[float]
    loss_diff: float
    grad_diff: float
    weight_diff: float
    worst: dict[str, str]
    counted: dict[str, Fraction]  # of rank 0
    predicted: dict[str, Fraction]
    bytes_agree: bool  # on every rank
    replicas_agree: bool  # ranks that hold the same block of a parameter hold the same bits
    parameters: int  # of the rank with the most

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.experiment.dtype]

    @property
    def ok(self) -> bool:
        differences = (self.loss_diff, self.grad_diff, self.weight_diff)
        return (
            self.bytes_agree and self.replicas_agree and all(difference <= self.tolerance for difference in differences)
        )

    def as_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "loss_diff": finite(self.loss_diff),
            "grad_diff": finite(self.grad_diff),
            "weight_diff": finite(self.weight_diff),
            "counted_bytes": {axis: plain(size) for axis, size in sorted(self.counted.items())},
            "predicted_bytes": {axis: plain(size) for axis, size in sorted(self.predicted.items())},
            "params_per_rank": self.parameters,
            "grid": self.experiment.grid.sizes,
        }


def verify(
    experiment: Experiment, device: devices.Kind = devices.CPU, pool: RankPool | None = None, timeout: float = 600
) -> Report:
    """Train serially and on the grid, on ranks of this machine. Raises UserError before it starts any."""
    experiment.forms()
    if experiment.weights is not None:
        check_weights(experiment.weights, experiment.skeleton())
    if pool is None:
        with RankPool(experiment.grid.world, device) as own:
            return verify(experiment, device, own, timeout)
    with tempfile.TemporaryDirectory(prefix="cubeloom-verify-") as folder:
        reference = (stale_run, experiment) if experiment.asynchronous else (serial_run, experiment.serial)
        (serial,) = pool.run(1, *reference, folder, device, timeout=timeout)
        outcomes = pool.run(experiment.grid.world, grid_run, experiment, folder, device, timeout=timeout)
    return _report(experiment, serial, outcomes)


def _report(experiment: Experiment, serial: Outcome, outcomes: list[Outcome]) -> Report:
    predicted = _predict(experiment)
    counted = [{axis: size for axis, size in outcome.counted.items() if size} for outcome in outcomes]
    worst = max(outcomes, key=lambda outcome: outcome.weight_diff)
    return Report(
        experiment=experiment,
        serial_losses=serial.losses,
        losses=outcomes[0].losses,
        loss_diff=max(
            no_less_than_nan(abs(ours - theirs) / abs(theirs))
            for outcome in outcomes
            for ours, theirs in zip(outcome.losses, serial.losses, strict=True)
        ),
        grad_diff=max(outcome.grad_diff for outcome in outcomes),
        weight_diff=worst.weight_diff,
        worst=worst.worst,
        counted=counted[0],
        predicted=predicted[0],
        # What a recomputation moves depends on where torch can stop it, so it is not predicted.
        bytes_agree=bool(experiment.recompute) or counted == predicted,
        replicas_agree=_replicas_agree(outcomes),
        parameters=max(outcome.parameters for outcome in outcomes),
    )


def _replicas_agree(outcomes: list[Outcome]) -> bool:
    seen: dict[tuple[str, tuple[int, ...]], str] = {}
    return all(seen.setdefault(block, bits) == bits for outcome in outcomes for block, bits in outcome.digests.items())


def _predict(experiment: Experiment) -> list[dict[str, Fraction]]:
    """The closed form for all steps, for each rank."""
    grid, batch, item = experiment.grid, experiment.batch, experiment.dtype.itemsize
    how, zero = experiment.rest.gradients, experiment.zero
    if experiment.schedule is None:
        forms = experiment.forms()
        each = [step_volume(forms, grid, batch, item, grid.coordinates(rank), how, zero) for rank in range(grid.world)]
    else:
        layout = experiment.layout(experiment.schedule)
        each = [pipeline_volume(layout, grid, batch, item, rank, how, zero) for rank in range(grid.world)]
    return [{axis: size * experiment.steps for axis, size in step.items()} for step in each]
