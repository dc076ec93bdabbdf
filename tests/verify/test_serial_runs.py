"""A serial run is shared by experiments for which it is the same, and by no others; a wrong or missing one is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cubeloom import Grid
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, OurModel, build
from cubeloom.models.weights import save_weights
from cubeloom.parallel import Batch, ShardingPolicy, initial_values, materialise
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment
from cubeloom.tools.verify.runs import WEIGHTS, gradients_of
from serial_runs import LOSSES, Verified, described, key_of

TINY = GPTConfig(vocab=32, positions=8, hidden=16, layers=2, heads=2)
ON_X = Experiment(model=OurModel(TINY), grid=Grid(x=2), batch=Batch(4, 8), steps=2)

# What another serial run needs, and what does not change it. Every field of an experiment is in one of them.
OTHERS: dict[str, Any] = {
    "model": OurModel(replace(TINY, heads=4)),
    "batch": Batch(8, 8),
    "steps": 3,
    "dtype": torch.float32,
    "seed": 1,
    "initial_seed": 1,
    "repeat": True,
    "learning_rate": 1e-2,
    "weights": "a file",
    "nudged": True,
    "moments": "bfloat16",
}
ALIKE: dict[str, Any] = {
    "grid": Grid(y=2),
    "rest": ShardingPolicy(activations="replicated", weights="kept"),
    "zero": True,
    "fp32_master_weights": False,
    "offload": True,
    "schedule": generate("1f1b", 2, 2),
    "patience": 60.0,
    "ways": 2,
    "recompute": True,
    "record": True,
    "compile": True,
}


@pytest.fixture
def apart(ranks: RankPool, tmp_path: Path) -> Verified:
    """With a folder of its own, in which nothing is yet."""
    return Verified(ranks, tmp_path)


def test_every_field_of_an_experiment_is_thought_of() -> None:
    assert {each.name for each in fields(Experiment)} == OTHERS.keys() | ALIKE.keys()
    assert not OTHERS.keys() & ALIKE.keys()


@pytest.mark.parametrize("name", ALIKE)
def test_what_makes_no_difference_on_one_device_shares_the_run(name: str) -> None:
    assert key_of(replace(ON_X, **{name: ALIKE[name]})) == key_of(ON_X)


@pytest.mark.parametrize("name", OTHERS)
def test_what_makes_a_difference_has_a_run_of_its_own(name: str, tmp_path: Path) -> None:
    value = OTHERS[name]
    if name == "weights":
        value = str(tmp_path / "weights.safetensors")
        Path(value).write_bytes(b"these")
    other = replace(ON_X, **{name: value})
    first = key_of(other)
    assert first != key_of(ON_X) and first == key_of(other)
    if name == "weights":
        Path(value).write_bytes(b"those")
        assert key_of(other) != first


def test_with_dropout_and_with_stale_weights_it_depends_on_more() -> None:
    """Then the serial model is a cube of one device, or has the schedule's versions of its weights."""
    dropped = replace(ON_X, model=OurModel(replace(TINY, dropout=0.1)))
    assert key_of(dropped) != key_of(replace(dropped, rest=ShardingPolicy(gradients="model")))
    stale = [generate("pipedream-2bw", 2, microbatches) for microbatches in (2, 4)]
    keys = {key_of(replace(ON_X, grid=Grid(pipe=2, data=data), schedule=each)) for data in (1, 2) for each in stale}
    assert len(keys) == 4 and key_of(ON_X) not in keys


def test_models_that_differ_in_their_type_alone_are_told_apart() -> None:
    class Other(GPTConfig):
        pass

    assert described(TINY) != described(Other(vocab=32, positions=8, hidden=16, layers=2, heads=2))
    with pytest.raises(TypeError, match="cannot be told apart"):
        described(object())


def test_it_is_computed_once_and_again_where_the_key_changes(
    apart: Verified, tmp_path: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Experiment] = []
    plain: Callable[..., Any] = RankPool.run

    def counting(self: RankPool, size: int, function: Callable[..., Any], *arguments: Any, **more: Any) -> list[Any]:
        if function.__name__ == "serial_run":
            trained.append(arguments[0])
        return plain(self, size, function, *arguments, **more)

    monkeypatch.setattr(RankPool, "run", counting)
    first = apart(ON_X)
    assert first.ok and apart(replace(ON_X, grid=Grid(y=2))).serial_losses == first.serial_losses
    assert len(trained) == 1
    of_another_worker = Verified(ranks, tmp_path)
    assert of_another_worker(ON_X).ok and len(trained) == 1
    changed = apart(replace(ON_X, seed=1))
    assert changed.ok and changed.serial_losses != first.serial_losses
    assert [each.seed for each in trained] == [0, 1]


def test_two_workers_may_compute_it_at_once(apart: Verified, tmp_path: Path) -> None:
    run = apart.serially(ON_X)
    kept = {file.name: file.read_bytes() for file in run.folder.iterdir()}
    apart._compute(ON_X, run.folder)  # as one does that did not see it a moment ago
    assert {file.name: file.read_bytes() for file in run.folder.iterdir()} == kept
    assert apart(ON_X).ok


def _doubled(file: Path) -> None:
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: 2 * tensors[name]}, file)


@pytest.mark.parametrize("name", [gradients_of(0), gradients_of(1), WEIGHTS])
def test_a_wrong_run_is_noticed(apart: Verified, name: str) -> None:
    assert apart(ON_X).ok
    _doubled(apart.serially(ON_X).folder / name)
    assert not apart(ON_X).ok


def test_wrong_losses_are_noticed(apart: Verified) -> None:
    (apart.serially(ON_X).folder / LOSSES).write_text("[1.0, 1.0]")
    assert apart(ON_X).wrong == ["loss"]


def test_a_run_that_lacks_a_file_is_an_error(apart: Verified) -> None:
    (apart.serially(ON_X).folder / gradients_of(1)).unlink()
    with pytest.raises(FileNotFoundError):
        apart(ON_X)


def test_weights_of_a_file_are_those_that_it_has_now(apart: Verified, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    losses = []
    for seed in (1, 2):
        with torch.device("meta"):
            model = build(TINY)
        save_weights(materialise(model, initial_values(model, seed, torch.float64)), file)
        report = apart(replace(ON_X, weights=str(file)))
        assert report.ok
        losses.append(report.serial_losses)
    assert losses[0] != losses[1]
