"""FP8 on a grid is FP8 on one device, to 1e-10 in float64; gathers move one byte an element."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from compiling import without_kernels
from cubeloom import Grid
from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm import Network, devices
from cubeloom.launch import RankPool
from cubeloom.models import config
from cubeloom.models.our_model import OurModel
from cubeloom.parallel import Batch, Contract, Cut, Expand, ParallelConfig, ShardingPolicy, apply, step_volume
from cubeloom.parallel.fp8 import (
    AmaxHistory,
    FP8Matmul,
    LayerFP8,
    scales_of,
)
from cubeloom.parallel.fp8_operations import DTYPES, GRADIENT, INPUT, WEIGHT, largest, round_to_fp8
from cubeloom.parallel.parameter import distribute
from cubeloom.parallel.specs import LinearSpec, fp8_layers
from cubeloom.parallel.traced.values import own_values
from cubeloom.parallel.weight import PrefetchOrder, Weight
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment
from grids import rest_is_long
from parity import holds
from serial_runs import Verified

FP8 = ShardingPolicy(precision="fp8")

pytestmark = pytest.mark.timeout(120)


def experiment(grid: str, model: str = "gpt-tiny", samples: int = 4, **changes: Any) -> Experiment:
    on = Grid.parse(grid)
    chosen: dict[str, Any] = {"batch": Batch(samples, 16), "steps": 3, "rest": FP8, **changes}
    return Experiment(model=OurModel(config(model)), grid=on, **chosen)


@pytest.mark.parametrize("grid", ["x=1", "x=2", "y=2", "z=2", "data=2", "x=2,y=2,z=2"])
def test_every_axis(verified: Verified, grid: str) -> None:
    holds(verified(experiment(grid)))


@pytest.mark.parametrize(
    ("grid", "rest"),
    [
        ("y=2,z=2", replace(FP8, inputs="regathered", weights="kept")),
        ("x=2,z=2", replace(FP8, activations="replicated")),
        ("x=2,y=2", replace(FP8, inputs="regathered")),
        ("y=2,z=2", replace(FP8, weights="replicated")),
    ],
)
def test_every_way_to_store_operands(verified: Verified, grid: str, rest: ShardingPolicy) -> None:
    holds(verified(experiment(grid, "llama-tiny", rest=rest)))


def test_numbers_of_ranks_that_are_no_powers_of_two(verified: Verified) -> None:
    """A rank's gradients are three times those of the serial model, and are rounded as those."""
    holds(verified(experiment("data=3", samples=6)))


@pytest.mark.parametrize(
    ("grid", "ways", "recompute"),
    rest_is_long(
        [("x=2,y=2", 2, False), ("x=2,y=2", 1, True), ("x=2,y=2", 2, True), ("y=2,z=2", 2, True)],
        [("x=2,y=2", 2, True)],
    ),
)
def test_strands_and_recomputation(verified: Verified, grid: str, ways: int, recompute: bool) -> None:
    holds(verified(experiment(grid, ways=ways, recompute=recompute)))


@pytest.mark.parametrize(
    ("name", "grid", "microbatches"),
    [("1f1b", "pipe=2", 4), ("chimera-zb", "pipe=2", 4), ("1f1b", "z=2", 2), ("chimera", "pipe=2,z=2", 2)],
)
def test_pipelines_and_microbatches(verified: Verified, name: str, grid: str, microbatches: int) -> None:
    on = Grid.parse(grid)
    schedule = generate(name if on.pipe > 1 else "1f1b", on.pipe, microbatches)
    holds(verified(experiment(grid, schedule=schedule, samples=4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"schedule": generate("1f1b", 1, 2)},
        pytest.param({"recompute": True}, marks=pytest.mark.long),
    ],
)
def test_compiled_blocks_round_as_well(ranks: RankPool, verified: Verified, changes: dict[str, Any]) -> None:
    """The backend makes no kernels, which would take minutes."""
    ranks.run(2, without_kernels)
    holds(verified(experiment("data=2", compile=True, **changes)))


def test_a_bert_s_blocks_and_not_its_head(verified: Verified) -> None:
    wanted = experiment("x=2,y=2", "bert-tiny")
    names = fp8_layers(wanted.specs())
    assert len(names) == 4 * config("bert-tiny").layers  # type: ignore[union-attr]
    assert all(name.startswith("blocks.") for name in names)
    holds(verified(wanted))


def test_gathers_move_one_byte_an_element() -> None:
    """Of a float64 element an eighth; sums stay in the model's dtype."""
    wanted = experiment("x=2,y=2,z=2")
    layer = next(spec for spec in wanted.specs() if isinstance(spec, LinearSpec) and spec.takes_fp8)
    plain = ParallelConfig.exact(wanted.grid, ShardingPolicy(), wanted.batch, item=8)
    eight = replace(plain, precision="fp8")
    gathered = {(each.phase, each.of_weight): each for each in layer.transfers(eight) if each.element == "operand"}
    assert set(gathered) == {("F", False), ("I", False), ("W", False), ("F", True), ("I", True)}
    assert step_volume([layer], replace(eight, first_step=True))["z"] == step_volume([layer], plain)["z"]
    spared = step_volume([layer], plain)["z"] - step_volume([layer], eight)["z"]
    assert spared == Fraction(7, 8) * 2 * 8 * layer.k * layer.n / 4 / 2  # W is gathered twice, half of it from another


def test_scales_are_the_largest_powers_of_two_that_fit() -> None:
    amax = torch.tensor([[448.0, 448.1, 57344.0], [0.0, 1e-30, 57345.0], [1.75, 1.76, 3e-45]])
    expected = torch.tensor([[1.0, 0.5, 1.0], [1.0, 2.0**108, 0.5], [2.0**8, 2.0**7, 2.0**126]])
    assert torch.equal(scales_of(amax), expected)
    for operand in (INPUT, WEIGHT, GRADIENT):
        most = torch.finfo(DTYPES[operand]).max
        values = torch.tensor([most, 2 * most, -most / 3, 0.0])
        rows, columns, found = round_to_fp8(values[None], torch.tensor(1.0), operand, 1.0, True, True)
        assert found == 2 * most and torch.equal(rows.float(), columns.t().float())
        eight = rows[0].float()
        assert eight[0] == eight[1] == most  # beyond the largest: the largest
        assert abs(eight[2] / values[2] - 1) < 2.0 ** -(2 + (operand != GRADIENT))


def test_rounding_is_coarse(verified: Verified) -> None:
    """The reference rounds too: the first step's loss is the model's, and later ones are not."""
    wanted = experiment("x=1")
    fp8 = verified.serially(wanted).losses
    plain = verified.serially(replace(wanted, rest=ShardingPolicy())).losses
    assert fp8[0] == plain[0]
    for eight, exact in zip(fp8[1:], plain[1:], strict=True):
        assert 1e-8 < abs(eight - exact) < 0.1


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="updates weights within a step"):
        experiment("pipe=2", schedule=generate("pipedream", 2, 4)).specs()
    with pytest.raises(UserError, match="no linear on tokens"):
        replace(experiment("x=1", "unet-tiny"), batch=Batch(4, 1)).specs()


@pytest.mark.parametrize("sizes", [(32, 16, 48), (33, 16, 48)])  # tokens, inputs, outputs
def test_matmuls_of_the_device_give_what_the_emulation_gives(ranks: RankPool, sizes: tuple[int, int, int]) -> None:
    """A CPU has the same function, without its speed. Sizes that GPUs do not take are emulated."""
    (alike,) = ranks.run(1, _both_products, sizes)
    assert alike


def _both_products(sizes: tuple[int, int, int]) -> bool:
    rows, k, n = sizes
    network = Network(Grid())
    parameter = distribute(network, torch.randn(n, k), (n, k), {})
    weight = Weight(parameter, network.axis("z"), "replicated", PrefetchOrder(), "layer")
    of = weight.rounding = LayerFP8(AmaxHistory(["layer"], network), "layer", weight)
    for operand, shape in ((INPUT, (2, rows, k)), (GRADIENT, (2, rows, n))):
        of.history.measure("layer", operand, largest(3.0 * torch.randn(shape)))
    of.history.end_step()
    found: list[list[torch.Tensor]] = []
    torch.manual_seed(0)
    x, dy = torch.randn(2, rows, k), torch.randn(2, rows, n)
    for there in (False, True):
        calls: list[torch.dtype] = []
        scaled = torch_private.scaled_product

        def counted(*given: Any, calls: list[torch.dtype] = calls, scaled: Any = scaled, **named: Any) -> torch.Tensor:
            calls.append(given[0].dtype)
            return scaled(*given, **named)

        with (
            patch.object(devices, "multiplies_fp8", lambda _, there=there: there),
            patch.object(torch_private, "scaled_product", counted),
        ):
            use = of.use(False, torch.float32)
            assert isinstance(use, FP8Matmul)
            values, gradient = use.input.of(x), use.output_gradient.of(dy)
            whole = weight.forward("layer", True)
            dw = use.weight_gradient(gradient, values, weight.parameter.shape, None, torch.float32)
            earlier = dw.clone()
            more = use.weight_gradient(gradient, values, weight.parameter.shape, earlier, torch.float32)
            found.append([use.forward(values, whole), use.input_gradient(gradient, whole, x.shape), dw, more])
        # The weight gradient sums over rows.
        assert len(calls) == (0 if not there else 4 if 2 * rows % 16 == 0 else 0)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*found, strict=True))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.down(self.up(x))))


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Twice(), Twice()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _losses_of_twice(compile: bool) -> list[float]:
    if compile:
        without_kernels()
    torch.manual_seed(0)
    model = TwoBlocks().double()
    cut: Cut = {"blocks.*.up": Expand(), "blocks.*.down": Contract()}
    apply(model, cut, Network(Grid()), Batch(4, 6), own_values(model), FP8, compile, unchecked=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(24, 8, dtype=torch.float64)
    found = []
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_block_that_calls_a_linear_twice_rounds_too(ranks: RankPool) -> None:
    plain, compiled = (ranks.run(1, _losses_of_twice, each)[0] for each in (False, True))
    assert max(abs(a - b) for a, b in zip(plain, compiled, strict=True)) < 1e-12
