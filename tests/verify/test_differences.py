"""A number that is none is as wrong as can be, wherever it turns up among the right ones."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cubeloom import Grid
from cubeloom.cube import Batch
from cubeloom.models import config
from cubeloom.verify import Experiment
from cubeloom.verify.report import Report, _report
from cubeloom.verify.runs import Blocks, Outcome, _compare

EVERYTHING = (slice(None),)


@pytest.mark.parametrize("place", range(3))
def test_a_tensor_with_a_nan_differs_most(tmp_path: Path, place: int) -> None:
    names = ["a", "b", "c"]
    save_file({name: torch.ones(4) for name in names}, tmp_path / "serial.safetensors")
    mine: Blocks = {name: (torch.ones(4), EVERYTHING) for name in names}
    mine[names[place]][0][2] = nan
    assert _compare(mine, tmp_path / "serial.safetensors") == (inf, names[place])


def reported(serial: list[float], grid: list[float]) -> Report:
    experiment = Experiment(model=config("gpt-tiny"), grid=Grid(), batch=Batch(2, 8))
    return _report(experiment, Outcome(losses=serial), [Outcome(losses=grid)])


@pytest.mark.parametrize("losses", [[nan, 2.0, 1.0], [3.0, nan, 1.0], [3.0, 2.0, nan]])
def test_a_loss_that_is_no_number_is_not_right(losses: list[float]) -> None:
    assert reported([3.0, 2.0, 1.0], [3.0, 2.0, 1.0]).ok
    found = reported([3.0, 2.0, 1.0], losses)
    assert found.loss_diff == inf and not found.ok


def test_a_serial_model_that_diverged_proves_nothing() -> None:
    assert not reported([3.0, nan], [3.0, nan]).ok


def test_json_has_no_infinity() -> None:
    assert reported([3.0], [nan]).as_json()["loss_diff"] is None
