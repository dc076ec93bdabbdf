"""A checkpoint of one grid goes on on any other: the next losses are those of the run that never stopped."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cubeloom import Grid, UserError
from cubeloom.base.file_errors import FilesFailed
from cubeloom.comm import CommunicationError, Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.parallel import Batch, apply, initial_values
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.train import BlockOptimizer, ShardedOptimizer
from cubeloom.train.checkpoint import (
    checkpoints,
    load_checkpoint,
    manifest,
    newest,
    read_manifest,
    save,
    save_checkpoint,
    seal,
)
from cubeloom.train.checkpoint.blocks import write_blocks
from cubeloom.train.checkpoint.save import _write
from cubeloom.train.checkpoint.shard import Shard

pytestmark = pytest.mark.timeout(120)

MODEL = GPTConfig(vocab=64, positions=8, hidden=16, layers=2, heads=4)
BATCH = Batch(8, 8)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


@dataclass(frozen=True)
class On:
    """Where to train."""

    grid: str
    schedule: str | None = None
    zero: bool = False

    @property
    def world(self) -> int:
        return Grid.parse(self.grid).world


def tokens(step: int) -> Tensor:
    return (torch.arange(64) * (step + 3)).view(8, 8) % 64


def train(
    on: On,
    folder: Path | None,
    first: int,
    last: int,
    width: int = 16,
    make: Callable[..., torch.optim.Optimizer] = ADAMW,
) -> list[float]:
    """Losses of the steps from `first` on; begins from the newest checkpoint if it begins late, and leaves one at the end."""
    grid = Grid.parse(on.grid)
    network = Network(grid)
    with torch.device("meta"):
        model = build(GPTConfig(vocab=64, positions=8, hidden=width, layers=2, heads=4))
    fill = initial_values(model, 0, torch.float64)
    forward_backward: Callable[[dict[str, Tensor], int], float]
    if on.schedule is None:
        state = apply(model, cut_of(model), network, BATCH, fill)
        parameters, gradients = dict(model.named_parameters()), state.gradients
        forward_backward = partial(_step, model)
    else:
        pipeline = Pipeline(model, cut_of(model), network, BATCH, fill, generate(on.schedule, grid.pipe, 4))
        parameters, gradients = pipeline.parameters, pipeline.gradients
        forward_backward = pipeline.step
    optimizer: BlockOptimizer | ShardedOptimizer = (
        ShardedOptimizer(parameters.values(), gradients, make) if on.zero else BlockOptimizer(parameters.values(), make)
    )
    if first:
        assert folder is not None
        done, progress = load_checkpoint(checkpoints(folder)[-1], parameters, optimizer, network)
        assert done == first and progress == {"position": 8 * first}
    losses = []
    for step in range(first, last):
        mine = network.share(tokens(step))
        losses.append(forward_backward({"tokens": mine, "targets": mine}, step))
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        save_checkpoint(folder, last, parameters, optimizer, network, {"position": 8 * last})
    return losses


def _step(model: torch.nn.Module, data: dict[str, Tensor], step: int) -> float:
    loss: Tensor = model(**data)
    loss.backward()
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("saved", [On("pipe=2,data=2,x=2", "chimera", zero=True), On("y=2,data=2")])
def test_any_grid_goes_on_from_any_other(ranks: RankPool, tmp_path: Path, saved: On) -> None:
    never_stopped = ranks.run(1, train, On("x=1"), None, 0, 4)[0]
    first = ranks.run(saved.world, train, saved, tmp_path, 0, 2)[0]
    assert first == pytest.approx(never_stopped[:2], rel=1e-10)
    for on in (On("z=4"), On("pipe=4", "chimera"), On("x=1"), On("data=2,y=2", zero=True)):
        rest = ranks.run(on.world, train, on, tmp_path, 2, 4)[0]  # the second loss is of weights updated after loading
        assert rest == pytest.approx(never_stopped[2:], rel=1e-10), on
        for written in checkpoints(tmp_path)[1:]:
            written.rename(tmp_path / "host_group")
            (tmp_path / "host_group").rename(tmp_path / f"host_group-{on.grid}")


def test_only_the_newest_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    for last in (1, 2, 3):
        (tmp_path / f".step-0000000{last + 3}").mkdir()  # of a save that was killed
        ranks.run(2, train, On("x=2"), tmp_path, last - 1, last)
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert not list(tmp_path.glob(".step*"))


def test_a_half_written_one_is_never_read(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, train, On("x=2"), tmp_path, 0, 1)
    (tmp_path / ".step-00000009").mkdir()
    (tmp_path / "step-00000000").mkdir()
    assert newest(tmp_path) == tmp_path / "step-00000001"
    assert checkpoints(tmp_path) == [tmp_path / "step-00000001"]


def test_one_that_lost_its_manifest_is_not_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    """Training would begin anew, or go on from an older one, and nobody would know."""
    ranks.run(1, train, On("x=1"), tmp_path, 0, 1)
    (tmp_path / "step-00000002").mkdir()
    said = "step-00000002 is damaged: manifest.json is missing; step-00000001 beside it is older: to go on from there, take"
    with pytest.raises(UserError, match=said):
        newest(tmp_path)


def _shards(network: Network) -> dict[str, Shard]:
    return {"a": Shard.of(torch.zeros(2), (2 * network.grid.world,), (2 * network.rank,))}


def _save_through_errors(grid: Grid, folder: Path, number: int, times: int) -> None:
    """Save once, where the first writes of rank 1 fail with this error."""
    network, plain = Network(grid), write_blocks
    calls: list[int] = []

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if network.rank == 1:
            patch.setattr(save, "write_blocks", fail)
        _write(folder, 1, _shards(network), network, network.host_group, {}, {}, 2)


def test_an_error_that_passes_does_not_end_the_save(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save_through_errors, Grid(data=2), tmp_path, errno.ESTALE, 2)
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000001"]
    said = r"step-00000001 could not be written: Stale file handle \(tried 4 times\)"
    with pytest.raises(FilesFailed, match=said):  # which restarts: a UserError would end the job
        ranks.run(2, _save_through_errors, Grid(data=2), tmp_path / "never", errno.ESTALE, 99)
    with pytest.raises(UserError, match=r"rank 1 of 2 on .*: the checkpoint .* could not be written: the disk is full"):
        ranks.run(2, _save_through_errors, Grid(data=2), tmp_path / "full", errno.ENOSPC, 1)


def _save_with_a_stale_list(grid: Grid, folder: Path, times: int) -> None:
    """Save once, where rank 0 is not shown the files of rank 1 so many times."""
    network, plain = Network(grid), Path.iterdir
    looks: list[Path] = []

    def stale(path: Path) -> list[Path]:
        looks.append(path)
        return [file for file in plain(path) if len(looks) > times or not file.name.startswith("rank-00001")]

    with pytest.MonkeyPatch.context() as patch:
        if network.rank == 0:
            patch.setattr(Path, "iterdir", stale)
        _write(folder, 1, _shards(network), network, network.host_group, {}, {}, 2)


def test_one_that_lacks_a_file_is_not_sealed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save_with_a_stale_list, Grid(data=2), tmp_path, 2)
    there = sorted(each.name for each in (tmp_path / "step-00000001").iterdir() if each.name != "manifest.json")
    assert sorted(read_manifest(tmp_path / "step-00000001")["files"]) == there and "rank-00001.safetensors" in there
    with pytest.raises((FilesFailed, CommunicationError), match=r"missing is what ranks wrote: rank-00001.safetensors"):
        ranks.run(2, _save_with_a_stale_list, Grid(data=2), tmp_path / "never", 99)
    assert not checkpoints(tmp_path / "never")


def test_only_what_ranks_wrote_and_the_index_names_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "PAUSES", ())
    for name in ("a", "b"):
        (tmp_path / name).touch()
    for written, named, said in (
        ("ab", "a", "the index does not name what ranks wrote: b"),
        ("a", "ab", "no rank wrote what the index names: b"),
        ("abc", "abc", "missing is what ranks wrote: c"),
        ("a", "a", "unknown: b"),
    ):
        with pytest.raises(FilesFailed, match=f"is not whole: {said}$"):
            seal(tmp_path, 1, {}, None, dict.fromkeys(written, "0"), list(named))
    seal(tmp_path, 1, {}, None, dict.fromkeys("ab", "0"), ["a", "b"])


def test_a_manifest_outlives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk before the folder that it is in can be given its name: first its text, then its own name."""
    synced: list[tuple[Path, bool]] = []
    file = tmp_path / "manifest.json"
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append((Path(f"/proc/self/fd/{number}").readlink(), file.exists()))
    )
    seal(tmp_path, 1, {})
    assert synced == [(tmp_path / ".manifest.json.partial", False), (tmp_path, True)]


def test_an_optimizer_does_not_go_on_from_another(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, train, On("x=1"), tmp_path, 0, 1, 16, SGD)
    said = r"has the state of SGD, and the optimizer here is AdamW; go on with SGD, or begin a new run"
    with pytest.raises(UserError, match=said):
        ranks.run(1, train, On("x=1"), tmp_path, 1, 2)


def test_damaged_and_foreign_ones_are_named_and_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, train, On("x=1"), tmp_path, 0, 1)
    (whole,) = checkpoints(tmp_path)
    with pytest.raises(UserError, match=r"is of another model: embed.weight is \[64, 16\], and here \[64, 32\]"):
        ranks.run(1, train, On("x=1"), tmp_path, 1, 2, 32)
    data = next(whole.glob("rank-*"))
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=f"is damaged: {data.name} is not what was written"):
        ranks.run(1, train, On("x=1"), tmp_path, 1, 2)
    with pytest.raises(UserError, match=f"is damaged: {data.name} is not what was written"):
        ranks.run(2, train, On("x=2"), tmp_path, 1, 2)  # one of them has looked at it, and both are refused
    data.unlink()
    with pytest.raises(UserError, match=f"is damaged: {data.name} is missing"):
        ranks.run(1, train, On("x=1"), tmp_path, 1, 2)
