"""`cubeloom.load`, `save` and `save_pretrained`: a checkpoint that any mesh goes on from, and folders of Hugging Face's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cubeloom
from cubeloom import Grid, Network, UserError
from cubeloom.launch import RankPool

from .parallelized import apart, batches, build, loss_of, untouched

CLOSE = 1e-10


def without_values(kind: str) -> Any:
    with torch.device("meta"):
        return untouched(kind).double()


def steps(model: Any, optimizer: torch.optim.Optimizer, kind: str, which: slice, mesh: Network | None) -> list[float]:
    losses = []
    for batch in list(batches(kind, 4))[which]:
        loss = loss_of(model, batch if mesh is None else mesh.shard(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def begin(grid: Grid, kind: str, folder: Path) -> list[float]:
    mesh, model = Network(grid), build(kind)
    cubeloom.parallelize(model, mesh)
    optimizer = adamw(model)
    losses = steps(model, optimizer, kind, slice(2), mesh)
    assert cubeloom.save(model, folder, optimizer=optimizer).parent == folder
    return losses


def go_on(grid: Grid, kind: str, folder: Path) -> tuple[list[float], float]:
    mesh, serial, model = Network(grid), build(kind), without_values(kind)
    cubeloom.parallelize(model, mesh)
    optimizer = adamw(model)
    assert cubeloom.load(model, folder, optimizer=optimizer) == 2
    losses = steps(model, optimizer, kind, slice(2, 4), mesh)
    steps(serial, adamw(serial), kind, slice(4), None)
    return losses, apart(model, serial, mesh)


@pytest.mark.parametrize(
    "kind, before, after",
    [
        pytest.param("nano", "z=2", "x=2", marks=pytest.mark.slow),
        pytest.param("llama", "z=4", "y=2", marks=pytest.mark.long),
        pytest.param("gpt2", "x=2,y=2", "data=2", marks=pytest.mark.long),
        pytest.param("bert", "data=2,y=2", "x=2,z=2", marks=pytest.mark.long),
    ],
)
def test_another_mesh_goes_on_with_the_same_curve(
    kind: str, before: str, after: str, ranks: RankPool, tmp_path: Path
) -> None:
    first, second = Grid.parse(before), Grid.parse(after)
    serial = build(kind)
    wanted = steps(serial, adamw(serial), kind, slice(4), None)
    begun = ranks.run(first.world, begin, first, kind, tmp_path)
    for losses, (more, weights) in zip(begun, ranks.run(second.world, go_on, second, kind, tmp_path), strict=False):
        assert [*losses, *more] == pytest.approx(wanted, abs=CLOSE)
        assert weights < CLOSE


def loaded_and_written(grid: Grid, kind: str, source: Path, target: Path) -> tuple[float, float]:
    """From plain transformers and back; a base model's folder has no prefix."""
    mesh, serial, model = Network(grid), build(kind), without_values(kind)
    cubeloom.parallelize(model, mesh)
    assert cubeloom.load(model, source) == 0
    (batch,) = batches(kind, 1)
    difference = abs(loss_of(model, mesh.shard(batch)).item() - loss_of(serial, batch).item())
    cubeloom.save_pretrained(model, target)
    return difference, apart(model, serial, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, grid",
    [
        ("gpt2", "x=2"),
        pytest.param("llama", "y=2,z=2", marks=pytest.mark.long),
        pytest.param("bert", "x=2,y=2", marks=pytest.mark.long),
    ],
)
def test_a_folder_of_hugging_face_s_in_and_out(kind: str, grid: str, ranks: RankPool, tmp_path: Path) -> None:
    serial, where = build(kind), Grid.parse(grid)
    serial.save_pretrained(tmp_path / "in")
    for loss, weights in ranks.run(where.world, loaded_and_written, where, kind, tmp_path / "in", tmp_path / "out"):
        assert loss < CLOSE
        assert weights == 0
    again = type(serial).from_pretrained(tmp_path / "out", dtype=torch.float64)
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("in", "out")]
    assert configs[0] == configs[1]
    found, wanted = again.state_dict(), serial.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def refused(folder: Path) -> list[str]:
    mesh, said = Network(Grid()), []
    model = without_values("gpt2")

    def ask(call: Any, *arguments: Any, **named: Any) -> None:
        with pytest.raises(UserError) as error:
            call(*arguments, **named)
        said.append(str(error.value))

    ask(cubeloom.load, model, folder / "gpt2")
    cubeloom.parallelize(model, mesh)
    ask(model, **next(batches("gpt2", 1)))
    for name in ("bert", "wide", "deep", "nothing"):
        ask(cubeloom.load, model, folder / name)
    ask(cubeloom.load, model, folder / "gpt2", optimizer=torch.optim.SGD(model.parameters()))
    nano = build("nano")
    cubeloom.parallelize(nano, mesh)
    ask(cubeloom.save_pretrained, nano, folder / "out")
    return said


@pytest.mark.slow
def test_another_model_s_folder_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    GPT2LMHeadModel(GPT2Config(**{**sizes, "vocab_size": 64})).save_pretrained(tmp_path / "wide")
    GPT2LMHeadModel(GPT2Config(**{**sizes, "n_layer": 2})).save_pretrained(tmp_path / "deep")
    build("bert").save_pretrained(tmp_path / "bert")
    (tmp_path / "nothing").mkdir()
    (said,) = ranks.run(1, refused, tmp_path)
    early, empty, bert, wide, deep, nothing, optimizer, nano = said
    assert (
        early
        == "this GPT2LMHeadModel was not parallelized: call cubeloom.parallelize(model, mesh) or cubeloom.pipeline first"
    )
    assert "built on the meta device and has no values yet: call cubeloom.load(model, folder)" in empty
    assert (
        "bert is of another model: it has no transformer.wte.weight (and 15 more); the nearest that it has is" in bert
    )
    assert "wide is of another model: transformer.wte.weight is [64, 32] there and [96, 32] here" in wide
    assert "deep is of another model: it has transformer.h.1.attn.c_attn.bias (and 11 more), and this GPT2" in deep
    assert "nothing has no checkpoint and is no Hugging Face folder (no config.json)" in nothing
    assert "is a Hugging Face folder, which has no state of an optimizer: load without `optimizer`" in optimizer
    assert nano == "Loss has no configuration of Hugging Face's: use cubeloom.save"
