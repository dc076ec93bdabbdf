"""A grid goes on from what was imported, and transformers from what a grid had saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import build, cut_of
from cubeloom.models.description import config_from, describe
from cubeloom.parallel import Batch, apply, initial_values
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.tools.convert import convert
from cubeloom.train import BlockOptimizer
from cubeloom.train.checkpoint import checkpoints, load_checkpoint, read_manifest, save_checkpoint
from cubeloom.train.job import Job
from cubeloom.train.job.settings import ModelSettings, RateSettings
from cubeloom.train.loop import train

from . import folders

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class On:
    grid: str
    schedule: str | None = None
    dtype: torch.dtype = torch.float64


def loss_of(on: On, run: Path, save: Path | None = None) -> float:
    """The loss on this grid with the weights of a run, whose newest checkpoint says what model it is; and save them again."""
    grid = Grid.parse(on.grid)
    network = Network(grid)
    checkpoint = checkpoints(run)[-1]
    config = config_from(read_manifest(checkpoint)["progress"]["model"])
    with torch.device("meta"):
        model = build(config)
    batch, fill = Batch(*folders.tokens().shape), initial_values(model, 0, on.dtype)
    mine = network.share(folders.tokens())
    parameters: dict[str, nn.Parameter]
    forward: Callable[[dict[str, Tensor]], float]
    if on.schedule is None:
        apply(model, cut_of(model), network, batch, fill)
        parameters, forward = dict(model.named_parameters()), lambda data: float(model(**data))
    else:
        pipeline = Pipeline(model, cut_of(model), network, batch, fill, generate(on.schedule, grid.pipe, 4))
        parameters, forward = pipeline.parameters, pipeline.step
    optimizer = BlockOptimizer(parameters.values(), partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0))
    assert load_checkpoint(checkpoint, parameters, optimizer, network)[0] == 0
    loss = forward({"tokens": mine, "targets": mine})
    if save is not None:
        save_checkpoint(save, 7, parameters, optimizer, network, {"model": describe(config)})
    return loss


def their_loss(theirs: folders.Theirs) -> float:
    return cross_entropy(folders.logits(theirs).flatten(0, 1), folders.tokens().flatten()).item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.long), "llama tied", "bert"])
def test_an_import_has_their_loss_on_a_grid(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    dtype = torch.float64 if kind in ("gpt2", "bert") else torch.float32  # their Llama's norms are float32 anyway
    theirs = folders.prepare(folders.MODELS[kind](), dtype)
    convert(folders.saved(tmp_path / "theirs", theirs), tmp_path / "ours")
    losses = ranks.run(4, loss_of, On("x=2,y=2", dtype=dtype), tmp_path / "ours")
    assert losses == [pytest.approx(their_loss(theirs), rel=1e-10 if dtype == torch.float64 else 1e-5)] * 4


def test_an_import_of_tied_weights_has_their_loss_in_a_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    theirs = folders.prepare(folders.gpt2(), torch.float64)
    convert(folders.saved(tmp_path / "theirs", theirs), tmp_path / "ours")
    losses = ranks.run(4, loss_of, On("pipe=2,x=2", "chimera"), tmp_path / "ours")
    assert losses == [pytest.approx(their_loss(theirs), rel=1e-10)] * 4


@pytest.mark.parametrize("on", [On("x=2,y=2"), On("pipe=2,x=2", "chimera")], ids=lambda on: on.grid)
def test_what_a_grid_saved_is_exported(ranks: RankPool, tmp_path: Path, on: On) -> None:
    """Blocks of many ranks, joined again to the file they came from."""
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.gpt2(), torch.float64))
    convert(source, tmp_path / "ours")
    ranks.run(4, loss_of, on, tmp_path / "ours", tmp_path / "run" / "checkpoints")
    done = convert(tmp_path / "run", tmp_path / "back")
    assert done.source == tmp_path / "run" / "checkpoints" / "step-00000007"
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_run_in_bfloat16_is_exported_with_all_digits_of_its_masters(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(
        folder=tmp_path / "run",
        steps=3,
        dtype="bfloat16",
        model=ModelSettings(preset="gpt-tiny"),
        batch=Batch(4, 8),
        grid=Grid(x=2),
        rate=RateSettings(warmup=1),
    )
    ranks.run(2, train, job)
    convert(job.folder, tmp_path / "rounded")
    convert(job.folder, tmp_path / "whole", dtype=torch.float32)
    rounded, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("rounded", "whole"))
    for name, tensor in whole.items():
        assert torch.equal(tensor.bfloat16(), rounded[name]), name
    name = "transformer.wte.weight"
    assert not torch.equal(whole[name], rounded[name].float())
