"""A number that is none is as wrong as can be, wherever it turns up among the right ones."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from cubeloom import Grid
from cubeloom.comm import devices
from cubeloom.models import preset
from cubeloom.parallel import Batch
from cubeloom.tools.verify import Experiment, SerialRun, runs
from cubeloom.tools.verify import report as reports
from cubeloom.tools.verify.report import Report, _report
from cubeloom.tools.verify.runs import Blocks, Outcome, compare, grid_run
from serial_runs import Verified

EVERYTHING = (slice(None),)


@pytest.mark.parametrize("place", range(3))
def test_a_tensor_with_a_nan_differs_most(tmp_path: Path, place: int) -> None:
    names = ["a", "b", "c"]
    save_file({name: torch.ones(4) for name in names}, tmp_path / "serial.safetensors")
    mine: Blocks = {name: [(torch.ones(4), EVERYTHING)] for name in names}
    mine[names[place]][0][0][2] = nan
    found = compare(mine, tmp_path / "serial.safetensors", names)
    assert found == {name: inf if name == names[place] else 0.0 for name in names}


def test_what_is_missing_on_one_side_differs_most(tmp_path: Path) -> None:
    """A gradient that nobody computed; of another stage's parameters nothing is asked."""
    save_file(
        {"both": torch.ones(4), "serial": torch.ones(4), "elsewhere": torch.ones(4)}, tmp_path / "serial.safetensors"
    )
    mine: Blocks = {name: [(torch.ones(4), EVERYTHING)] for name in ("both", "grid")}
    names = ["both", "serial", "grid", "neither"]
    assert compare(mine, tmp_path / "serial.safetensors", names) == {"both": 0.0, "serial": inf, "grid": inf}


def test_rows_in_another_order_and_padding(tmp_path: Path) -> None:
    """What lies nowhere in the whole must be zero; a NaN on both sides is no agreement."""
    file = tmp_path / "serial.safetensors"
    save_file({"a": torch.arange(4.0), "nan": torch.tensor([1.0, nan])}, file)
    ends = [(torch.tensor([2.0, 3.0]), (slice(2, 4),)), (torch.tensor([1.0]), (slice(1, 2),))]
    for padding, expected in ((0.0, 0.0), (1e-30, inf), (nan, inf)):
        mine: Blocks = {"a": [*ends, (torch.tensor([0.0, padding]), None)]}
        assert compare(mine, file, ["a"]) == {"a": expected}
    assert compare({"a": [(torch.tensor([2.0]), (slice(3, 4),))]}, file, ["a"]) == {"a": pytest.approx(1 / 3)}
    assert compare({"nan": [(torch.tensor([1.0, nan]), EVERYTHING)]}, file, ["nan"]) == {"nan": inf}


def reported(serial: list[float], grid: list[float]) -> Report:
    experiment = Experiment(model=preset("gpt-tiny"), grid=Grid(), batch=Batch(2, 8))
    return _report(experiment, experiment.specs(), SerialRun(serial, Path()), [Outcome(losses=grid)])


@pytest.mark.parametrize("losses", [[nan, 2.0, 1.0], [3.0, nan, 1.0], [3.0, 2.0, nan]])
def test_a_loss_that_is_no_number_is_not_right(losses: list[float]) -> None:
    assert reported([3.0, 2.0, 1.0], [3.0, 2.0, 1.0]).ok
    found = reported([3.0, 2.0, 1.0], losses)
    assert found.loss_diff == inf and not found.ok


def test_a_serial_model_that_diverged_proves_nothing() -> None:
    assert not reported([3.0, nan], [3.0, nan]).ok


def test_json_has_no_infinity() -> None:
    assert reported([3.0], [nan]).as_json()["loss_diff"] is None


def off(gradient: float, rounding: float) -> Report:
    found = reported([3.0], [3.0])
    found.differences["gradient a"], found.rounding["gradient a"] = gradient, rounding
    return found


def test_what_rounding_alone_explains_is_right_and_no_more() -> None:
    assert off(4.6e-10, 2e-10).ok
    assert not off(4.6e-10, 0.0).ok  # rounding was not looked at, or does nothing here
    assert not off(1e-6, 2e-10).ok
    # However large rounding is: a sum over two ranks that lacks one, or is twice as large, is off by half.
    assert not off(0.5, 0.2).ok and not off(1.0, 1.0).ok and not off(0.5, 0.2).may_be_rounding
    assert off(1e-6, 2e-10).may_be_rounding and not off(1e-12, 0.0).may_be_rounding


def damaged(scale: float, experiment: Experiment, folder: str, kind: devices.Kind) -> Outcome:
    """A run whose gradient of one weight is off by a factor, or not there."""
    plain = runs._gradient_blocks

    def blocks(*given: Any) -> Blocks:
        found = plain(*given)
        ((local, where),) = found.pop("blocks.0.mlp.up.weight")
        return found if scale == 0 else {**found, "blocks.0.mlp.up.weight": [(local * scale, where)]}

    with patch.object(runs, "_gradient_blocks", blocks):
        return grid_run(experiment, folder, kind)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rounding_is_told_from_errors(dtype: torch.dtype, verified: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tolerance, so that rounding has to explain every difference."""
    monkeypatch.setattr(reports, "TOLERANCE", {dtype: 1e-18})
    experiment = Experiment(model=preset("gpt-tiny"), grid=Grid(x=2, z=2), batch=Batch(4, 8), dtype=dtype, steps=2)
    found = verified(experiment)
    assert found.rounding.keys() == found.differences.keys()
    explained = {what: each for what, each in found.differences.items() if each <= found.allowed(what)}
    assert len(explained) >= 0.9 * len(found.differences)  # a loss in few digits may come out the same twice
    for scale in (0.5, 2.0, 0.0) if dtype == torch.bfloat16 else (1 + 1e-9, 2.0, 0.0):
        with monkeypatch.context() as patched:
            patched.setattr(reports, "grid_run", partial(damaged, scale))
            wrong = verified(experiment)
        assert not wrong.ok and wrong.wrong[0] == "gradient blocks.0.mlp.up.weight", scale
