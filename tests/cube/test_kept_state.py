"""What a user set on a plain model before it is cut: frozen parameters, evaluation, forwards and hooks of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from compiling import without_kernels
from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import Config, GPTConfig, build, config, cut_of
from cubeloom.parallel import Batch, CutError, ShardingPolicy, apply, initial_values, materialise, resolve
from cubeloom.parallel.replace import Fill
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline

GPT = GPTConfig(vocab=24, positions=8, hidden=16, layers=2, heads=2, dropout=0.5)
TOKENS = torch.arange(4 * 8).view(4, 8) % 24
# Tied to the head, all of a block, a weight without its bias and the other way round, a norm.
FROZEN = ("embed.weight", "blocks.0.", "blocks.1.mlp.up.weight", "blocks.1.mlp.down.bias", "norm.bias")


def built(what: Config, frozen: tuple[str, ...]) -> nn.Module:
    with torch.device("meta"):
        model = build(what)
    for name, each in model.named_parameters():
        each.requires_grad_(not name.startswith(frozen))
    return model.eval()


def fill(model: nn.Module) -> Fill:
    return initial_values(model, 0, torch.float64)  # type: ignore[arg-type]


def updated(model: nn.Module, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients, after a step of an optimizer that would change whatever has one."""
    before = {name: whole(each).clone() for name, each in model.named_parameters()}
    model(**data).backward()
    torch.optim.AdamW(model.parameters(), weight_decay=0.1).step()
    for name, each in model.named_parameters():
        assert each.requires_grad == (each.grad is not None) == (not torch.equal(before[name], whole(each))), name
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def serial(what: Config, frozen: tuple[str, ...], data: dict[str, Tensor]) -> dict[str, Tensor]:
    model = built(what, frozen)
    return updated(materialise(model, fill(model)), data)


def cut(
    grid: Grid, what: Config, frozen: tuple[str, ...], data: dict[str, Tensor], compiled: bool
) -> dict[str, Tensor]:
    model, network = built(what, frozen), Network(grid)
    samples = len(next(iter(data.values())))
    if compiled:
        without_kernels()
    apply(model, cut_of(model), network, Batch(samples, 8), fill(model), compile=compiled)
    assert not any(each.training for each in model.modules())
    with network.recording() as ledger:
        found = updated(model, {name: network.share(each) for name, each in data.items()})
    origins = {entry.origin for entry in ledger.entries}
    assert not any(f"{name} weight gradient" in origins for name in ("embed", "blocks.0.mlp.up", "blocks.1.mlp.up"))
    return found


@pytest.mark.parametrize(
    ("grid", "compiled"),
    [("z=2", False), ("y=2", False), ("data=2,x=2", False), pytest.param("data=2", True, marks=pytest.mark.long)],
)
def test_what_is_frozen_stays_frozen_and_what_evaluates_evaluates(grid: str, compiled: bool, ranks: RankPool) -> None:
    """Compiled, too, where a block is one function of all its parameters."""
    what = replace(GPT, dropout=0.0) if compiled else GPT
    data = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}
    wanted, where = serial(what, FROZEN, data), Grid.parse(grid)
    for found in ranks.run(where.world, cut, where, what, FROZEN, data, compiled):
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            assert torch.allclose(gradient, wanted[name], rtol=0, atol=1e-12), name


def test_convolutions_and_their_norms_too(ranks: RankPool) -> None:
    frozen = ("blocks.0.", "blocks.1.bn1.weight", "blocks.1.conv2.")
    data = {
        "images": torch.linspace(-1, 1, 2 * 3 * 32 * 32).double().sin().view(2, 3, 32, 32),
        "targets": torch.tensor([1, 2]),
    }
    what = config("resnet-tiny")
    wanted = serial(what, frozen, data)
    for found in ranks.run(2, cut, Grid(y=2), what, frozen, data, False):
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            assert torch.allclose(gradient, wanted[name], rtol=0, atol=1e-12), name


def piped(frozen: tuple[str, ...]) -> set[str]:
    model = built(GPT, frozen)
    made = Pipeline(model, cut_of(model), Network(Grid(pipe=2)), Batch(4, 8), fill(model), generate("1f1b", 2, 2))
    made.step({"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}, 0)
    assert all(each.requires_grad == (not name.startswith(frozen)) for name, each in made.parameters.items())
    return {name for name, each in made.parameters.items() if each.grad is not None}


def test_a_stage_may_be_frozen_as_a_whole(ranks: RankPool) -> None:
    frozen = ("embed.", "positions.", "blocks.0.")
    first, second = ranks.run(2, piped, frozen)
    assert first == set() and "blocks.1.mlp.up.weight" in second and "embed.weight" not in second


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """Computes what torch's does."""


def ignore(*_: object) -> None:
    pass


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    def resolved(kind: type[nn.Linear]) -> None:
        model = built(GPT, ())
        with torch.device("meta"):
            model.blocks[0].mlp.up = kind(16, 64)  # type: ignore[union-attr, index]
        resolve(model, cut_of(model), Grid(y=2), ShardingPolicy(), Batch(4, 8))

    resolved(Renamed)
    told = r"layer blocks.0.mlp.up \(Twice\) has a forward of its own, which would be lost: only Linear as torch has it"
    with pytest.raises(CutError, match=told):
        resolved(Twice)


def test_hooks_of_a_layer_are_refused_and_those_of_a_block_stay() -> None:
    def resolved(model: nn.Module) -> None:
        resolve(model, cut_of(model), Grid(y=2), ShardingPolicy(), Batch(4, 8))

    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        model = built(GPT, ())
        getattr(model.blocks[0], f"register_{register}")(ignore)  # type: ignore[index]
        resolved(model)
        getattr(model.blocks[0].norm1, f"register_{register}")(ignore)  # type: ignore[union-attr, index]
        with pytest.raises(CutError, match=r"layer blocks.0.norm1 \(LayerNorm\) has hooks .* after the model is cut"):
            resolved(model)
    model = built(GPT, ())
    model.norm.weight.register_hook(ignore)  # type: ignore[union-attr, operator]
    with pytest.raises(CutError, match=r"layer norm \(LayerNorm\) has hooks"):
        resolved(model)
