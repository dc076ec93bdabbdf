"""Compiled, a model computes the same: as a whole on one device, between collectives on a cube, in any schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from compiling import without_kernels
from cubeloom import Grid
from cubeloom.base.initial import Initial, Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, build, config, cut_of
from cubeloom.models.layers import MLP
from cubeloom.parallel import Batch, ShardingPolicy, apply, initial_values, resolve
from cubeloom.parallel import compiled as compiled_layers
from cubeloom.parallel.compiled import compile_local, whole_blocks
from cubeloom.parallel.layers import Contract, Cut, Expand
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.products import Matmul
from cubeloom.parallel.resolution import specs_of
from cubeloom.parallel.state import CubeState
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime.build import hold, plan_stages

BATCH = Batch(4, 12)
TOKENS = (torch.arange(BATCH.samples * BATCH.sequence).view(BATCH.samples, -1) * 7) % 50

pytestmark = pytest.mark.timeout(120)


def skeleton(name: str) -> Any:
    with torch.device("meta"):
        return build(config(name))


@pytest.mark.parametrize(
    ("model", "grid", "blocks"),
    [
        ("gpt-tiny", "data=2", {"blocks.0", "blocks.1", "norm"}),
        ("gpt-tiny", "y=2", set()),
        ("llama-tiny", "x=1", {"blocks.0", "blocks.1", "norm"}),
    ],
)
def test_which_blocks_are_compiled_as_a_whole(model: str, grid: str, blocks: set[str]) -> None:
    plain, on = skeleton(model), Grid.parse(grid)
    forms = resolve(plain, cut_of(plain), on, ShardingPolicy(), Batch(4, 12))
    assert set(whole_blocks(plain, forms, on)) == blocks


def test_blocks_that_are_alike_are_compiled_once() -> None:
    """What differs from block to block, such as a forward of its own, would make the compiler give up after eight."""
    model, graphs = build(replace(cast(GPTConfig, config("gpt-tiny")), layers=9)), []

    def kept(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    run = torch.compile(lambda block, x: block(x, 12), backend=kept)
    blocks = whole_blocks(model, specs_of(model, cut_of(model)), Grid())
    for name, block in blocks.items():
        if name != "norm":
            assert isinstance(block.mlp, MLP) and type(block.mlp) is not MLP  # GELU within matmuls
            run(block, torch.ones(24, 96))
    assert len(blocks) == 10 and len(graphs) == 1


def _sizes_that_vary() -> set[str]:
    """Runs of blocks and norm without and with gradients, as a pipeline has them."""
    found = set[str]()

    def seen(graph: torch.fx.GraphModule, given: list[Any]) -> Any:
        found.update(str(each) for each in given if isinstance(each, torch.SymInt))
        return graph

    model = skeleton("llama-tiny")
    with patch.object(compiled_layers, "BACKEND", seen):
        apply(model, cut_of(model), Network(Grid()), BATCH, initial_values(model, 0, torch.float64), compile=True)
    with torch.no_grad():
        model(TOKENS, TOKENS)
    model(TOKENS, TOKENS).backward()
    return found


def test_sizes_that_differ_between_blocks_are_constants_in_each(ranks: RankPool) -> None:
    """As variables they would be divided by for every element: Llama's rotary kernels ran 15 times as long."""
    assert ranks.run(1, _sizes_that_vary) == [set()]


def test_a_block_with_dropout_is_not() -> None:
    plain = skeleton("gpt-tiny")
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    forms = resolve(plain, cut_of(plain), Grid(), ShardingPolicy(), BATCH)
    assert set(whole_blocks(plain, forms, Grid())) == {"norm"}


def gradients(model: nn.Module, network: Network) -> list[Tensor]:
    """Of two passes, summed."""
    for shift in (0, 1):
        model(network.share(TOKENS.roll(shift)), network.share(TOKENS)).backward()
    return [local_of(cast(Tensor, parameter.grad)).clone() for parameter in model.parameters()]


def cut(name: str, network: Network, compiles: bool) -> tuple[Any, CubeState]:
    model = skeleton(name)
    plain = whole_blocks(model, resolve(model, cut_of(model), network.grid, ShardingPolicy(), BATCH), network.grid)
    state = apply(model, cut_of(model), network, BATCH, initial_values(model, 0, torch.float64))
    if compiles:
        without_kernels()
        compile_local(model, plain, state)
    return model, state


def largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def differences(name: str, grid: Grid) -> float:
    network = Network(grid)
    return largest_difference(*(gradients(cut(name, network, compiles)[0], network) for compiles in (False, True)))


@pytest.mark.parametrize(
    ("name", "grid"),
    [("gpt-tiny", "x=1"), pytest.param("llama-tiny", "data=2", marks=pytest.mark.long), ("llama-tiny", "x=2,y=2")],
)
def test_gradients(ranks: RankPool, name: str, grid: str) -> None:
    on = Grid.parse(grid)
    assert max(ranks.run(on.world, differences, name, on)) <= 1e-12


def put_off() -> tuple[set[str], float]:
    """The parameters whose gradients wait to be drained, and how far all are then from those of layers apart."""
    network = Network(Grid())
    (apart, _), (model, state) = (cut("gpt-tiny", network, compiles) for compiles in (False, True))
    expected = gradients(apart, network)
    missing: set[str] = set()
    for shift in (0, 1):
        with state.gradients.defer_weight_grads() as noted:
            model(TOKENS.roll(shift), TOKENS).backward()
        if shift == 0:
            missing = {name for name, each in model.named_parameters() if each not in state.gradients.sums()}
        state.gradients.run_deferred(noted)
        state.gradients.reduce()
    found = [local_of(cast(Tensor, each.grad)) for each in model.parameters()]
    return missing, largest_difference(expected, found)


def test_weight_gradients_of_a_compiled_block_can_be_put_off(ranks: RankPool) -> None:
    [(missing, difference)] = ranks.run(1, put_off)
    layers = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")
    assert {f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in layers} <= missing
    assert not any("norm" in name for name in missing)
    assert difference <= 1e-12


def weights_added_by_their_products() -> int:
    """Of a second pass."""
    network = Network(Grid())
    model, _ = cut("gpt-tiny", network, compiles=True)
    with patch.object(Matmul, "weight_gradient", autospec=True, side_effect=Matmul.weight_gradient) as products:
        gradients(model, network)
    return sum(call.args[4] is not None for call in products.call_args_list)


def test_products_of_weight_gradients_add_themselves_to_earlier_ones(ranks: RankPool) -> None:
    assert ranks.run(1, weights_added_by_their_products) == [8]  # four of each block; the head computes its own


class Branch(nn.Module):
    """Adds one of two to the other, scaled; both come in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, pair: list[Tensor], *, scale: float) -> Tensor:
        return pair[0] + scale * self.layer(pair[1])


class Own(nn.Module):
    """A user's model, whose blocks are layers, or are called in ways of their own."""

    cut: ClassVar[Cut] = {"layers.*": Expand(), "branches.*.layer": Contract()}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.branches = nn.ModuleList(Branch() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, branch in zip(self.layers, self.branches, strict=True):
            x = branch([x, layer(x)], scale=0.5)
        return x.square().mean()

    def initial(self, name: str) -> Initial:
        return Normal(0.3)


def own_gradients(compiles: bool) -> list[Tensor]:
    """Of two passes with different rows."""
    without_kernels()
    with torch.device("meta"):
        model = Own()
    fill = initial_values(model, 0, torch.float64)
    apply(model, Own.cut, Network(Grid()), Batch(12, 1), fill, compile=compiles)
    for rows in (12, 6):
        model(torch.linspace(-1, 1, rows * 8, dtype=torch.float64).view(rows, 8)).backward()
    return [local_of(cast(Tensor, each.grad)) for each in model.parameters()]


@pytest.mark.slow
def test_blocks_that_are_layers_or_are_called_by_keyword(ranks: RankPool) -> None:
    [apart], [compiled] = ranks.run(1, own_gradients, False), ranks.run(1, own_gradients, True)
    assert largest_difference(apart, compiled) <= 1e-12


def held_blocks(schedule: str, recompute: Any) -> int:
    """How many blocks of a stage are compiled as a whole."""
    without_kernels()
    model, network = skeleton("gpt-tiny"), Network(Grid())
    layout = plan_stages(model, cut_of(model), Grid(), BATCH, generate(schedule, 1, 2), ShardingPolicy())
    held = hold(
        model, layout, network, initial_values(model, 0, torch.float64), ShardingPolicy(), recompute, 1, compile=True
    )
    whole = compiled_layers._Block
    return sum(isinstance(module.forward, whole) for each in held.models.values() for module in each.modules())


@pytest.mark.parametrize(
    ("schedule", "recompute", "blocks"), [("1f1b", False, 3), ("1f1b", "attention", 0), ("zb-h1", False, 3)]
)
def test_attention_computed_once_more_keeps_layers_apart(
    ranks: RankPool, schedule: str, recompute: Any, blocks: int
) -> None:
    assert ranks.run(1, held_blocks, schedule, recompute) == [blocks]
