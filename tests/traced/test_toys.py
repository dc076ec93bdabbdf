"""Small modules on grids: what is rare in models, and what `parallelize` refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cubeloom
from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel.parameter import Block, local_of
from cubeloom.parallel.specs import TracedEmbeddingSpec, TracedLinearSpec
from cubeloom.parallel.traced import trace
from grids import rest_is_long

from . import toys
from .parity import Difference, compare

KINDS = [
    *("Chain", "Gated", "InPlace", "Fan", "Twice", "Temperature", "Peeking", "Contradiction", "Images", "Frozen"),
    *(
        "Residual",
        "Softmax",
        "Scaled",
        "Hidden",
        "Remembered",
        "Attention",
        "Grouped",
        "Biased",
        "Functions",
        "TorchLayers",
    ),
    *("Repeated", "Buffered", "Asserting", "Solving"),
]


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "Frozen":
        module = toys.Frozen()
        module.first.weight.requires_grad_(False)
        return module.double()
    # Running statistics would be of the rank's own samples.
    made: nn.Module = getattr(toys, kind)()
    return made.double().eval()


class Squared(nn.Module):
    """A module with a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        return (found["out"] if isinstance(found, dict) else found).square().mean()


def loss_of(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = module(**batch)
    return found


def steps(grid: Grid, kinds: list[str]) -> dict[str, Difference]:
    """The second pass: by then the order of the weights is known, and they are gathered ahead."""
    images = torch.linspace(-1, 1, 4 * 4 * 6 * 6, dtype=torch.float64).sin().view(4, 4, 6, 6)
    rows = torch.linspace(-1, 1, 4 * 3 * 8, dtype=torch.float64).cos().view(4, 3, 8)
    network = Network(grid)
    return {
        kind: compare(network, Squared(build(kind)), {"x": images if kind == "Images" else rows}, loss_of, passes=2)
        for kind in kinds
    }


@pytest.mark.slow
@pytest.mark.parametrize("grid", rest_is_long(["x=2,y=2", "y=2,z=2", "data=2,z=2"], ["x=2,y=2"]))
def test_toys_on_a_grid(grid: str, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    for found in ranks.run(where.world, steps, where, KINDS):
        for kind, difference in found.items():
            assert difference.predicted, kind
            difference.check(kind)


def test_torch_s_own_attention_of_samples_that_are_cut(ranks: RankPool) -> None:
    for found in ranks.run(2, steps, Grid(data=2), ["TorchLayers"]):
        found["TorchLayers"].check("TorchLayers")


@pytest.mark.parametrize("kind, layer", [("Repeated", "inner.q"), ("Buffered", "inner.up"), ("Solving", "inner.up")])
def test_what_stays_cut(kind: str, layer: str) -> None:
    """Queries of keys that several ranks share; features that a table is added to; matrices that are inverted."""
    rows = torch.zeros(4, 3, 8, dtype=torch.float64)
    specs = {each.name: each for each in trace(Squared(build(kind)), Grid(x=2, y=2), {"x": rows}).specs}
    linear = specs[layer]
    assert isinstance(linear, TracedLinearSpec) and linear.given == "both"


def test_rows_that_all_samples_share_are_known_where_samples_cannot_be_cut() -> None:
    rows = torch.zeros(4, 3, 8, dtype=torch.float64)
    with pytest.raises(UserError, match="something else of some samples than of all"):
        trace(Squared(build("Mixing")), Grid(z=2), {"x": rows})
    specs = {each.name: each for each in trace(Squared(build("Mixing")), Grid(y=2), {"x": rows}).specs}
    places, up = specs["inner.places"], specs["inner.up"]
    assert isinstance(places, TracedEmbeddingSpec) and isinstance(up, TracedLinearSpec)
    assert [(call.rows_out, call.fixed) for call in (*places.calls, *up.calls)] == [(3, True), (3, False)]


def late_gradient(grid: Grid) -> float:
    """An input that wants a gradient, though the example's did not."""
    network, module = Network(grid), build("Chain")
    x = torch.linspace(-1, 1, 2 * toys.WIDTH, dtype=torch.float64).view(2, -1)
    (wanted,) = torch.autograd.grad(module(x.requires_grad_()).sum(), x)
    cubeloom.parallelize(module, network, example={"x": x.detach()})
    module(x).sum().backward()
    assert x.grad is not None
    return (x.grad - wanted).abs().max().item()


def test_an_input_may_want_a_gradient_later(ranks: RankPool) -> None:
    for difference in ranks.run(4, late_gradient, Grid(x=2, z=2)):
        assert difference < 1e-12


def from_fill(grid: Grid) -> tuple[list[str], bool, list[int]]:
    """A module on the meta device, with values by place; the names asked for, and shapes."""
    asked = []

    def fill(name: str, block: Block) -> Tensor:
        asked.append(name)
        whole = torch.arange(float(torch.Size(block.shape).numel())).view(block.shape)
        return whole[block.slices]

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    network = Network(grid)
    cubeloom.parallelize(module, network, example={"input": torch.zeros(2, 4)}, fill=fill)
    weight = module.get_parameter("0.weight")
    first, second = (network.coordinates[axis] * weight.shape[dim] // 2 for axis, dim in (("y", 0), ("x", 1)))
    right = local_of(weight)[0, 0].item() == 4 * first + second
    return sorted(asked), right, list(local_of(weight).shape)


def test_a_module_on_the_meta_device_is_filled(ranks: RankPool) -> None:
    for asked, right, shape in ranks.run(4, from_fill, Grid(x=2, y=2)):
        assert set(asked) == {"0.bias", "0.weight", "1.bias", "1.weight"}
        assert right
        assert shape == [4, 2]


def refused(grid: Grid) -> None:
    network, module = Network(grid), toys.Chain()
    example = {"x": torch.zeros(2, toys.WIDTH)}
    with pytest.raises(UserError, match="for the grid y=2"):
        trace(module, Grid(y=2), example).apply(module, network)
    cubeloom.parallelize(module, network, example=example)
    assert module.up.out_features == toys.INNER  # as before
    with pytest.raises(UserError, match="is parallelized already"):
        cubeloom.parallelize(module, network, example=example)
    with pytest.raises(UserError, match="cut already"):
        trace(module, grid, example)
    with pytest.raises(UserError, match=r"use cubeloom\.pipeline"):
        cubeloom.parallelize(toys.Chain(), Network(Grid(pipe=2)), example=example)


def test_what_is_refused(ranks: RankPool) -> None:
    ranks.run(2, refused, Grid(x=2))


def seeded_apart(grid: Grid) -> None:
    network = Network(grid)
    torch.manual_seed(network.rank)
    module = toys.Chain()
    cubeloom.parallelize(module, network, example={"x": torch.zeros(2, 8)})


def test_ranks_with_different_values_are_refused(ranks: RankPool) -> None:
    with pytest.raises(
        UserError, match=r"ranks have different values of up.weight: .* the same seed before the model is built"
    ):
        ranks.run(2, seeded_apart, Grid(x=2))


class Recentred(toys.Chain):
    """In training, features of the chain meet each other."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h - h.mean(-1, keepdim=True) if self.training else h)


def trained(grid: Grid) -> Difference:
    torch.manual_seed(0)
    rows = torch.linspace(-1, 1, 4 * 3 * 8, dtype=torch.float64).cos().view(4, 3, 8)
    return compare(Network(grid), Squared(Recentred().double()), {"x": rows}, loss_of)


def test_a_branch_of_training_inside_a_chain(ranks: RankPool) -> None:
    for difference in ranks.run(4, trained, Grid(x=2, y=2)):
        difference.check("Recentred")
