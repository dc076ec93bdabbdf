"""Compares a grid with the serial model, and reports the result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import torch

from cubeloom.comm import devices
from cubeloom.comm.ledger import plain
from cubeloom.launch import RankPool
from cubeloom.models.weights import check_weights
from cubeloom.parallel import ParallelConfig, step_volume
from cubeloom.parallel.recomputed import layers_of
from cubeloom.parallel.specs import LayerSpec, cut_share
from cubeloom.parallel.volume import Volume
from cubeloom.tools.verify.experiment import Experiment
from cubeloom.tools.verify.runs import WEIGHTS, Outcome, differences_of_files, grid_run, no_less_than_nan
from cubeloom.tools.verify.serial import Serially, SerialRun, train_serially
from cubeloom.train.metrics.record import finite

# The largest relative difference that passes at once. In float64 rounding is far below it; in the other dtypes
# gradients and weights mostly agree to a few units of their own rounding.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1}
# A larger difference passes if rounding alone explains it: at most this many times the difference between two serial
# runs, and always less than that of a sum which lacks a summand.
ROUNDINGS, MOST = 4.0, 0.3


@dataclass(frozen=True)
class Report:
    experiment: Experiment
    serial_losses: list[float]
    losses: list[float]
    differences: dict[str, float]  # relative: of the `loss`, and of `gradient` and `weight` of each parameter
    counted: dict[str, Fraction]  # of rank 0
    predicted: dict[str, Fraction]
    bytes_agree: bool  # on every rank
    replicas_agree: bool  # ranks with the same block of a parameter have the same bits
    parameters: int  # on the rank with the most
    cut_share: float  # the share of the parameters' elements that every axis of x, y and z cuts
    flops_share: float | None  # of the serial step's FLOPs, on the rank with the most; None: not counted
    rounding: dict[str, float] = field(default_factory=dict)  # the differences of two serial runs, if they were needed

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.experiment.dtype]

    def allowed(self, what: str) -> float:
        """The largest difference that passes."""
        return max(self.tolerance, min(ROUNDINGS * self.rounding.get(what, 0.0), MOST))

    @property
    def wrong(self) -> list[str]:
        """What differs too much, the worst first."""
        found = [what for what, difference in self.differences.items() if not difference <= self.allowed(what)]
        return sorted(found, key=lambda what: -self.differences[what] / self.allowed(what))

    @property
    def may_be_rounding(self) -> bool:
        return bool(self.wrong) and all(self.differences[what] <= MOST for what in self.wrong)

    @property
    def ok(self) -> bool:
        return self.bytes_agree and self.replicas_agree and not self.wrong

    def largest(self, kind: str) -> tuple[float, str]:
        """The largest difference of a `loss`, a `gradient` or a `weight`, and its name."""
        some = {what: each for what, each in self.differences.items() if what.partition(" ")[0] == kind}
        worst = max(some, key=lambda what: some[what], default="")
        return some.get(worst, 0.0), worst

    @property
    def loss_diff(self) -> float:
        return self.largest("loss")[0]

    @property
    def grad_diff(self) -> float:
        return self.largest("gradient")[0]

    @property
    def weight_diff(self) -> float:
        return self.largest("weight")[0]

    def as_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "loss_diff": finite(self.loss_diff),
            "grad_diff": finite(self.grad_diff),
            "weight_diff": finite(self.weight_diff),
            "counted_bytes": {axis: plain(size) for axis, size in sorted(self.counted.items())},
            "predicted_bytes": {axis: plain(size) for axis, size in sorted(self.predicted.items())},
            "params_per_rank": self.parameters,
            "cut_share": self.cut_share,
            "flops_share": self.flops_share,
            "grid": self.experiment.grid.sizes,
        }


def verify(
    experiment: Experiment,
    device: devices.Kind = devices.CPU,
    pool: RankPool | None = None,
    timeout: float = 600,
    serially: Serially | None = None,
) -> Report:
    """Train serially and on the grid, on ranks of this machine. Raises UserError before any rank starts.

    `serially` may return the serial run of an earlier experiment; without it every call trains its own.
    """
    specs = experiment.specs()
    if experiment.weights is not None:
        check_weights(experiment.weights, experiment.skeleton())
    if pool is None:
        with RankPool(experiment.grid.world, device) as own:
            return verify(experiment, device, own, timeout, serially)
    with tempfile.TemporaryDirectory(prefix="cubeloom-verify-") as made:

        def anew(wanted: Experiment) -> SerialRun:
            folder = Path(tempfile.mkdtemp(dir=made))
            return train_serially(wanted, folder, pool, device, timeout)

        known = serially or anew
        serial = known(experiment)
        outcomes = pool.run(experiment.grid.world, grid_run, experiment, str(serial.folder), device, timeout=timeout)
        report = _report(experiment, specs, serial, outcomes)
        if not report.may_be_rounding:
            return report
        nudged = known(replace(experiment, nudged=True))
        return replace(report, rounding=_rounding(serial, nudged, experiment.learning_rate))


def _rounding(serial: SerialRun, nudged: SerialRun, learning_rate: float) -> dict[str, float]:
    """The differences of two serial runs whose initial values differ by rounding."""
    found = {"loss": _loss_difference(nudged.losses, serial.losses)}
    for file in nudged.folder.glob("*.safetensors"):
        kind = "weight" if file.name == WEIGHTS else "gradient"
        least = learning_rate if kind == "weight" else None
        for name, difference in differences_of_files(file, serial.folder / file.name, least).items():
            found[f"{kind} {name}"] = max(difference, found.get(f"{kind} {name}", 0.0))
    return found


def _loss_difference(ours: list[float], theirs: list[float]) -> float:
    return max(no_less_than_nan(abs(a - b) / abs(b)) for a, b in zip(ours, theirs, strict=True))


def _report(experiment: Experiment, specs: Sequence[LayerSpec], serial: SerialRun, outcomes: list[Outcome]) -> Report:
    predicted = _predict(experiment, specs)
    counted = [{axis: size for axis, size in outcome.counted.items() if size} for outcome in outcomes]
    differences = {"loss": max(_loss_difference(outcome.losses, serial.losses) for outcome in outcomes)}
    for outcome in outcomes:
        for kind, found in (("gradient", outcome.gradients), ("weight", outcome.weights)):
            for name, difference in found.items():
                what = f"{kind} {name}"
                differences[what] = max(difference, differences.get(what, 0.0))
    return Report(
        experiment=experiment,
        serial_losses=serial.losses,
        losses=outcomes[0].losses,
        differences=differences,
        counted=counted[0],
        predicted=predicted[0],
        bytes_agree=counted == predicted,
        replicas_agree=_replicas_agree(outcomes),
        parameters=max(outcome.parameters for outcome in outcomes),
        cut_share=cut_share(specs, _config(experiment, 0)),
        flops_share=_flops_share(serial, outcomes),
    )


def _flops_share(serial: SerialRun, outcomes: list[Outcome]) -> float | None:
    counted = [outcome.flops for outcome in outcomes if outcome.flops is not None]
    return max(counted) / max(serial.flops, 1) if counted else None


def _config(experiment: Experiment, rank: int) -> ParallelConfig:
    place = experiment.grid.coordinates(rank)
    config = ParallelConfig.exact(experiment.grid, experiment.rest, experiment.batch, experiment.dtype.itemsize, place)
    return replace(config, ways=experiment.ways)


def _replicas_agree(outcomes: list[Outcome]) -> bool:
    seen: dict[tuple[str, tuple[int, ...]], str] = {}
    return all(seen.setdefault(block, bits) == bits for outcome in outcomes for block, bits in outcome.digests.items())


def _predict(experiment: Experiment, specs: Sequence[LayerSpec]) -> list[dict[str, Fraction]]:
    """The closed form for all steps, for each rank."""
    grid, zero = experiment.grid, experiment.zero
    places = [grid.coordinates(rank) for rank in range(grid.world)]
    configs = [_config(experiment, rank) for rank in range(grid.world)]
    step: Callable[[ParallelConfig, dict[str, int]], Volume]
    if experiment.schedule is None:
        again = [layers_of(block, specs) for block in experiment.blocks(experiment.skeleton(), specs)]
        step = lambda config, _: step_volume(specs, config, zero, again)  # noqa: E731
    else:
        layout = experiment.layout(experiment.schedule, unchecked=True)
        step = lambda config, place: layout.volume(config, place["pipe"], zero, experiment.recompute)  # noqa: E731
    found = []
    for config, place in zip(configs, places, strict=True):
        first, later = step(replace(config, first_step=True), place), step(config, place)
        axes = first.keys() | later.keys()
        none, more = Fraction(0), experiment.steps - 1
        found.append({axis: first.get(axis, none) + more * later.get(axis, none) for axis in axes})
    return found
