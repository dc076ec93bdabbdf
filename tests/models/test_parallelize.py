"""`cubeloom.parallelize` inside a training loop of a user's own: each thing that loops do is as in the serial model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cubeloom
from compiling import without_kernels
from cubeloom import Grid, Network
from cubeloom.launch import RankPool
from cubeloom.models.external import InDouble
from cubeloom.models.parallelize import handle_of
from cubeloom.parallel.parameter import local_of

from .parallelized import KINDS, apart, apart_of, batches, build, loss_of, parallelized, train

CLOSE = 1e-10
SHORT = {"llama": "x=2,y=2", "gpt2": "y=2", "bert": "z=2", "nano": "x=2"}
Trained = Callable[[Network, Any, str], float]
GRIDS = ("x=2", "y=2", "z=2", "x=2,y=2", "data=2,y=2", "data=2,z=2,y=2")


def three_steps(grid: Grid, kind: str) -> tuple[float, float, float]:
    mesh, serial = Network(grid), build(kind)
    model = parallelized(copy.deepcopy(serial), mesh)
    (losses, norms), (wanted, their_norms) = train(model, kind, mesh), train(serial, kind)
    return apart_of(losses, wanted), apart_of(norms, their_norms), apart(model, serial, mesh)


@pytest.mark.parametrize(
    "kind, grid",
    [
        pytest.param(kind, grid, marks=pytest.mark.slow if SHORT[kind] == grid else pytest.mark.long)
        for kind in KINDS
        for grid in GRIDS
    ],
)
def test_losses_norms_and_weights_are_the_serial_model_s(kind: str, grid: str, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    for loss, norm, weights in ranks.run(where.world, three_steps, where, kind):
        assert max(loss, norm, weights) < CLOSE, (loss, norm, weights)


def test_one_rank_is_a_grid_too(ranks: RankPool) -> None:
    assert max(ranks.run(1, three_steps, Grid(), "nano")[0]) < CLOSE


def on_torch_s_mesh() -> tuple[float, str]:
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("z", "y"))
    serial, model = build("nano"), build("nano")
    report = cubeloom.parallelize(model, theirs)
    mesh = handle_of(model).network
    losses, wanted = train(model, "nano", mesh, 1)[0], train(serial, "nano", None, 1)[0]
    return apart_of(losses, wanted), str(report.grid)


@pytest.mark.slow
def test_a_mesh_of_torch_s(ranks: RankPool) -> None:
    found = ranks.run(4, on_torch_s_mesh)
    assert max(each[0] for each in found) < CLOSE
    assert {each[1] for each in found} == {"z=2,y=2"}


# What loops do: each gives how far the model is from the serial one, both as they were built, the first cut over the mesh.


def accumulated(mesh: Network, serial: Any, kind: str) -> float:
    model = parallelized(copy.deepcopy(serial), mesh)
    for batch in batches(kind):
        (loss_of(model, mesh.shard(batch)) / 3).backward()
        (loss_of(serial, batch) / 3).backward()
    return apart(model, serial, mesh, gradients=True)


def frozen(mesh: Network, serial: Any, kind: str) -> float:
    for number, parameter in enumerate(serial.parameters()):
        parameter.requires_grad_(number % 3 == 0)
    model = parallelized(copy.deepcopy(serial), mesh)
    assert [each.requires_grad for each in model.parameters()] == [each.requires_grad for each in serial.parameters()]
    losses, wanted = train(model, kind, mesh)[0], train(serial, kind)[0]
    return max(apart_of(losses, wanted), apart(model, serial, mesh))


class Adapted(nn.Module):
    """A frozen linear and a trained path of low rank beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


def adapted(mesh: Network, serial: Any, kind: str) -> float:
    serial.requires_grad_(False)
    for name, module in list(serial.named_modules()):
        if isinstance(module, nn.Linear) and "head" not in name and "decoder" not in name:
            owner, _, own = name.rpartition(".")
            setattr(serial.get_submodule(owner), own, Adapted(module))
    model = parallelized(copy.deepcopy(serial), mesh)
    losses, wanted = train(model, kind, mesh)[0], train(serial, kind)[0]
    return max(apart_of(losses, wanted), apart(model, serial, mesh))


def averaged(mesh: Network, serial: Any, kind: str) -> float:
    """A moving average of the weights is a copy of the model; and the copy can be trained itself."""
    model = parallelized(copy.deepcopy(serial), mesh)
    mean, their_mean = copy.deepcopy(model), copy.deepcopy(serial)
    for each, average, over in ((model, mean, mesh), (serial, their_mean, None)):
        train(each, kind, over, 2)
        with torch.no_grad():
            for old, new in zip(average.parameters(), each.parameters(), strict=True):
                old.lerp_(new, 0.1)
    between = apart(mean, their_mean, mesh)
    losses, wanted = train(mean, kind, mesh, 2)[0], train(their_mean, kind, None, 2)[0]
    return max(between, apart_of(losses, wanted), apart(mean, their_mean, mesh))


def stored(mesh: Network, serial: Any, kind: str) -> float:
    state = parallelized(copy.deepcopy(serial), mesh).state_dict()
    assert set(state) == set(serial.state_dict())
    other = copy.deepcopy(serial)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    parallelized(other, mesh).load_state_dict(state)
    # Of what it was cut from nothing stays in memory.
    assert all(local_of(each).untyped_storage().nbytes() == local_of(each).nbytes for each in other.parameters())
    return apart(other, serial, mesh)


def recomputed(mesh: Network, serial: Any, kind: str) -> float:
    model: Any = parallelized(copy.deepcopy(serial), mesh)
    model.gradient_checkpointing_enable()
    model.train()
    losses, wanted = train(model, kind, mesh, 2)[0], train(serial, kind, None, 2)[0]
    return max(apart_of(losses, wanted), apart(model, serial, mesh))


def block_by_block(mesh: Network, serial: Any, kind: str) -> float:
    """As `recomputed`, by our own means."""
    model = copy.deepcopy(serial)
    cubeloom.parallelize(model, mesh, recompute=True)
    model.train()
    losses, wanted = train(model, kind, mesh, 2)[0], train(serial, kind, None, 2)[0]
    return max(apart_of(losses, wanted), apart(model, serial, mesh))


def recomputed_from_the_start(mesh: Network, serial: Any, kind: str) -> float:
    """transformers then has a hook on the embedding, whose weight the head has, too."""
    model = copy.deepcopy(serial)
    model.gradient_checkpointing_enable()
    model.train()
    report = cubeloom.parallelize(model, mesh)
    assert report.cut_share > 0.9
    losses, wanted = train(model, kind, mesh, 2)[0], train(serial, kind, None, 2)[0]
    return max(apart_of(losses, wanted), apart(model, serial, mesh))


def in_strands(mesh: Network, serial: Any, kind: str) -> float:
    """Compiled as well; a copy has its own, and what makes no graph is one strand."""
    without_kernels()
    serial.train()
    model = copy.deepcopy(serial)
    cubeloom.parallelize(model, mesh, ways=2, compile=True)
    mean, their_mean = copy.deepcopy(model), copy.deepcopy(serial)
    losses, wanted = train(model, kind, mesh, 2)[0], train(serial, kind, None, 2)[0]
    (batch,) = batches(kind, 1)
    with torch.no_grad():
        one = {name: each[:1] for name, each in batch.items()}
        losses.append(loss_of(model, one).item())
        wanted.append(loss_of(serial, one).item())
    copied = apart_of(train(mean, kind, mesh, 2)[0], train(their_mean, kind, None, 2)[0])
    return max(apart_of(losses, wanted), apart(model, serial, mesh), copied, apart(mean, their_mean, mesh))


def generated(mesh: Network, serial: Any, kind: str) -> float:
    model: Any = parallelized(copy.deepcopy(serial.eval()), mesh)
    tokens = torch.arange(6).view(2, 3) + 5
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    found, wanted = model.generate(tokens, **options), serial.generate(tokens, **options)
    return float((found - wanted).abs().max())


def with_a_loss_outside(mesh: Network, serial: Any, kind: str) -> float:
    """The mean over all samples, of what the model gives."""
    model = parallelized(copy.deepcopy(serial), mesh)
    (batch,) = batches(kind, 1)
    found = []
    for each, own in ((model, mesh.shard(batch)), (serial, batch)):
        with InDouble():
            logits = each(input_ids=own["input_ids"]).logits
        loss = logits.square().mean()
        loss.backward()
        found.append(loss.detach())
    return max(abs(found[0].item() - found[1].item()), apart(model, serial, mesh, gradients=True))


def compare(grid: Grid, kind: str, what: Trained) -> float:
    return what(Network(grid), build(kind), kind)


def cases() -> list[Any]:
    short = {
        (accumulated, "nano", "x=2,z=2"),
        (frozen, "nano", "x=2"),
        (adapted, "nano", "y=2"),
        (averaged, "nano", "y=2"),
        (stored, "nano", "y=2"),
        (recomputed, "llama", "x=2"),
        (block_by_block, "nano", "x=2,z=2"),
        (recomputed_from_the_start, "gpt2", "y=2"),
        (in_strands, "nano", "y=2"),
        (generated, "llama", "y=2"),
        (with_a_loss_outside, "gpt2", "z=2"),
    }
    of_any: tuple[Trained, ...] = (accumulated, frozen, adapted, averaged, stored)
    of_theirs: tuple[Trained, ...] = (recomputed, recomputed_from_the_start, with_a_loss_outside, in_strands)
    every = {
        (what, kind, grid) for what in of_any for kind in KINDS if kind != "gpt2" for grid in ("x=2,y=2", "y=2,z=2")
    }
    every |= {(what, kind, "x=2,z=2") for what in of_theirs for kind in ("llama", "gpt2", "bert")}
    every |= {(generated, kind, grid) for kind in ("llama", "gpt2") for grid in ("x=2,y=2", "y=2,z=2")}
    found = [*((each, pytest.mark.slow) for each in short), *((each, pytest.mark.long) for each in every - short)]
    found.sort(key=lambda each: (each[0][0].__name__, *each[0][1:]))
    return [pytest.param(*each, marks=mark, id=f"{each[0].__name__}-{each[1]}-{each[2]}") for each, mark in found]


@pytest.mark.parametrize("what, kind, grid", cases())
def test_what_loops_do(what: Trained, kind: str, grid: str, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    assert max(ranks.run(where.world, compare, where, kind, what)) < CLOSE


def in_autocast(grid: Grid, kind: str) -> tuple[float, float]:
    mesh, serial = Network(grid), build(kind, torch.float32)
    model = parallelized(copy.deepcopy(serial), mesh)
    (batch,) = batches(kind, 1)
    found = []
    for each, own in ((model, mesh.shard(batch)), (serial, batch)):
        with torch.autocast("cpu", torch.bfloat16):
            result: Any = each(**own)
        loss: Tensor = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        found.append(loss.item())
    return abs(found[0] - found[1]), apart(model, serial, mesh, gradients=True)


@pytest.mark.parametrize("kind", ["nano", pytest.param("llama", marks=pytest.mark.long)])
def test_autocast(kind: str, ranks: RankPool) -> None:
    for loss, gradients in ranks.run(2, in_autocast, Grid(y=2), kind):
        assert loss < 0.02  # bfloat16 has eight bits
        assert 1e-8 < gradients < 0.02
