"""Networks on images: every kind of convolution and norm on cut channels computes what the serial layer does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cubeloom import Grid, UserError
from cubeloom.base.initial import Initial, Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import MeanSquaredError, OurModel, UNetConfig, build, config, cut_of, preset
from cubeloom.parallel import (
    Batch,
    Cut,
    ParallelConfig,
    ShardingPolicy,
    apply,
    initial_values,
    materialise,
    resolve,
    step_volume,
)
from cubeloom.parallel import layers as declared
from cubeloom.parallel.parameter import Block, local_of
from cubeloom.parallel.weave import Weave
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment
from grids import CUBES, RESTS, rest_is_long
from parity import holds
from serial_runs import Verified

pytestmark = pytest.mark.timeout(180)


def experiment(model: str, grid: str, rest: Any = "sharded", ways: int = 1, **changes: Any) -> Experiment:
    on = Grid.parse(grid)
    samples = ways * on.data * on.z * max(on.x, 1) * max(on.y, 1)
    settings = {"batch": Batch(max(2, samples), 1), "steps": 2, "rest": ShardingPolicy(activations=rest), **changes}
    return Experiment(model=preset(model), grid=on, ways=ways, **settings)


UNETS = [
    ("z=2", "sharded"),
    ("x=2,y=2", "sharded"),
    ("x=2,y=2", "replicated"),
]


@pytest.mark.parametrize(
    ("grid", "rest"), rest_is_long(product(["x=2", "y=2", "z=2", "x=2,y=2", "data=2,x=2"], RESTS), UNETS)
)
def test_unet(verified: Verified, grid: str, rest: str) -> None:
    holds(verified(experiment("unet-tiny", grid, rest)))


@pytest.mark.long
@pytest.mark.parametrize(("grid", "rest"), [("x=3,y=2", "sharded"), ("x=2,y=2,z=2", "replicated"), ("y=8", "sharded")])
def test_unet_on_larger_cubes(verified: Verified, grid: str, rest: str) -> None:
    """On eight ranks there are more of them than groups of a norm: groups lie on several ranks."""
    holds(verified(experiment("unet-tiny", grid, rest, steps=1)))


RESNETS = [("x=2", "sharded"), ("y=2", "replicated"), ("z=2,x=2", "replicated"), ("data=2,y=2", "sharded")]


@pytest.mark.parametrize(
    ("grid", "rest"), rest_is_long(product(["x=2", "y=2", "z=2,x=2", "data=2,y=2"], RESTS), RESNETS)
)
def test_resnet(verified: Verified, grid: str, rest: str) -> None:
    holds(verified(experiment("resnet-tiny", grid, rest)))


WOVEN = [("x=2", 2, "sharded"), ("y=2", 4, "replicated"), ("z=2", 2, "sharded")]


@pytest.mark.parametrize(
    ("model", "grid", "ways", "rest"),
    rest_is_long(
        [(model, *case) for model in ("unet-tiny", "resnet-tiny") for case in WOVEN],
        [("unet-tiny", *WOVEN[0]), ("resnet-tiny", *WOVEN[1]), ("resnet-tiny", *WOVEN[2])],
    ),
)
def test_woven(verified: Verified, model: str, grid: str, ways: int, rest: str) -> None:
    holds(verified(experiment(model, grid, rest, ways)))


@pytest.mark.parametrize("grid", ["y=2", "data=2"])
def test_statistics_of_all_strands_where_stages_are_recomputed(verified: Verified, grid: str) -> None:
    """A strand that is computed once more is alone, and has the statistics of the first time."""
    woven = experiment("resnet-tiny", grid, "sharded", 2, recompute=True, schedule=generate("gpipe", 1, 1))
    report = verified(woven)
    assert max(report.loss_diff, report.grad_diff, report.weight_diff) <= 1e-10


def checkpointed_by_torch() -> None:
    network = Network(Grid(y=2))
    with torch.device("meta"):
        model = build(config("resnet-tiny"))
    apply(model, cut_of(model), network, Batch(4, 1), initial_values(model, 0, torch.float64))
    block = model.get_submodule("blocks.0")
    plain = block.forward
    block.forward = lambda x: checkpoint(plain, x, use_reentrant=False)
    images = torch.linspace(-1, 1, 4 * 3 * 32 * 32, dtype=torch.float64).view(4, 3, 32, 32)
    Weave(model, 2)(images, torch.arange(4)).backward()


def test_a_batch_norm_refuses_to_guess_its_strand(ranks: RankPool) -> None:
    with pytest.raises(UserError, match=r"use `cubeloom.parallel.weave.recompute` in place of torch's checkpoint"):
        ranks.run(2, checkpointed_by_torch)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "name"), [("pipe=4", "chimera"), ("pipe=2,y=2", "chimera-zb")])
def test_skip_connections_cross_the_stages_of_a_pipeline(verified: Verified, grid: str, name: str) -> None:
    on = Grid.parse(grid)
    schedule = generate(name, on.pipe, on.pipe)
    holds(verified(experiment("unet-tiny", grid, batch=Batch(2 * on.pipe, 1), schedule=schedule)))


@pytest.mark.long
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("model", ["unet-tiny", "resnet-tiny"])
@pytest.mark.parametrize("grid", CUBES)
def test_every_cube(verified: Verified, grid: str, model: str, ways: int, rest: str) -> None:
    holds(verified(experiment(model, grid, rest, ways, steps=3)))


def test_a_batch_norm_in_several_micro_batches_is_refused() -> None:
    with pytest.raises(
        UserError, match="norm_in is a batch norm, whose statistics would be those of each of 2 micro-batches"
    ):
        experiment("resnet-tiny", "pipe=2", schedule=generate("1f1b", 2, 2)).specs()


def test_turns_that_a_grid_does_not_divide_are_refused() -> None:
    narrow = replace(cast(UNetConfig, config("unet-tiny")), turns=2)
    with pytest.raises(UserError, match="turns of a concatenation, 2 cannot be cut over x=4"):
        replace(experiment("unet-tiny", "x=4"), model=OurModel(narrow)).specs()


class PrefetchOrder(nn.Module):
    """A convolution at each edge, and between them what is tried."""

    def __init__(self, dimensions: int, *middle: nn.Module) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.dimensions = dimensions
        self.first = conv(3, 8, 3, padding=1)
        self.middle = nn.Sequential(*middle)
        self.last = conv(8, 2, 1)
        self.loss = MeanSquaredError()

    def forward(self, images: Tensor) -> Tensor:
        y = self.last(self.middle(self.first(images)))
        return self.loss(y, torch.zeros(len(images), *y.shape[1:], dtype=y.dtype, device=y.device))

    def example(self, samples: int) -> dict[str, Tensor]:
        return {"images": torch.empty(samples, 3, *[9] * self.dimensions, device="meta")}

    def initial(self, name: str) -> Initial:
        return Normal(0.3)


EDGES: Cut = {
    "first": declared.ColwiseFromReplicated(),
    "last": declared.RowwiseToReplicated(),
    "loss": declared.SquaredLoss(),
}
THERE_AND_BACK: Cut = {"middle.0": declared.Expand(), "middle.2": declared.Contract()}


def layers(what: str) -> tuple[int, list[nn.Module], Cut]:
    """Dimensions, layers, and their cut."""
    match what:
        case "conv1d":
            return (
                1,
                [nn.Conv1d(8, 16, 3, stride=2), nn.SiLU(), nn.Conv1d(16, 8, 2, dilation=2, bias=False)],
                THERE_AND_BACK,
            )
        case "conv2d":
            pair = [nn.Conv2d(8, 16, (3, 2), (2, 1), (1, 0), (1, 2)), nn.SiLU(), nn.Conv2d(16, 8, 5, padding="same")]
            return 2, pair, THERE_AND_BACK
        case "conv3d":
            return 3, [nn.Conv3d(8, 8, 3, padding="valid"), nn.SiLU(), nn.Conv3d(8, 8, 2)], THERE_AND_BACK
        case "transposed":
            pair = [
                nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1, output_padding=1),
                nn.SiLU(),
                nn.ConvTranspose2d(16, 8, 2, dilation=2),
            ]
            return 2, pair, THERE_AND_BACK
        case "transposed1d":
            pair = [nn.ConvTranspose1d(8, 8, 4, stride=3), nn.SiLU(), nn.Conv1d(8, 8, 3)]
            return 1, pair, THERE_AND_BACK
        case "grouped":
            middle = [nn.Conv2d(8, 16, 3, groups=4), nn.SiLU(), nn.Conv2d(16, 8, 1)]
            return 2, middle, {"middle.0": declared.Grouped(), "middle.2": declared.RowwiseScatter()}
        case "norms":
            middle = [nn.GroupNorm(1, 8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(8, 8), nn.Conv2d(8, 8, 1)]
            cut: dict[str, declared.Declared] = {
                "middle.0": declared.Norm(),
                "middle.1": declared.Expand(),
                "middle.2": declared.Norm(side="y"),
                "middle.3": declared.Norm(side="y"),
                "middle.4": declared.Contract(),
            }
            return 2, middle, cut
        case "turned":
            middle = [nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 1)]
            return 2, middle, {"middle.0": declared.Expand(turn=True), "middle.2": declared.RowwiseScatter()}
    raise ValueError(what)


WHAT = ["conv1d", "conv2d", "conv3d", "transposed", "transposed1d", "grouped", "norms"]


def differences(what: str, grid: Grid, rest: Any) -> tuple[float, float, dict[str, Any], dict[str, Any]]:
    """The largest difference of the loss and of a gradient to the serial model's, and bytes counted and predicted."""
    network = Network(grid)
    with torch.device("meta"):
        dimensions, middle, cut = layers(what)
        plain, model = PrefetchOrder(dimensions, *layers(what)[1]), PrefetchOrder(dimensions, *middle)
    batch, whole = Batch(8, 1), EDGES | cut  # type: ignore[operator]
    fill = initial_values(model, 0, torch.float64)
    materialise(plain, fill)
    specs = resolve(model, whole, grid, ShardingPolicy(activations=rest), batch)
    apply(model, whole, network, batch, fill, ShardingPolicy(activations=rest))
    images = torch.linspace(-1, 1, 8 * 3 * 9**dimensions, dtype=torch.float64).sin().view(8, 3, *[9] * dimensions)
    serial = plain(images)
    serial.backward()
    with network.recording() as ledger:
        loss = model(network.share(images))
        loss.backward()
    worst = max(_difference(model.get_parameter(name), theirs, network) for name, theirs in plain.named_parameters())
    counted = {axis: size for axis, size in ledger.by_axis().items() if size}
    predicted = step_volume(
        specs, ParallelConfig.exact(grid, ShardingPolicy(activations=rest), batch, 8, network.coordinates)
    )
    return abs(loss.item() - serial.item()), worst, counted, predicted


def _difference(mine: nn.Parameter, theirs: nn.Parameter, network: Network) -> float:
    assert mine.grad is not None and theirs.grad is not None
    places = zip(mine.device_mesh.mesh_dim_names, mine.placements, strict=True)  # type: ignore[attr-defined]
    cuts = {axis: place.dim for axis, place in places if place.is_shard()}
    block = Block.of(network, tuple(theirs.shape), cuts)
    return (local_of(mine.grad) - theirs.grad[block.slices]).abs().max().item()


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("what", WHAT)
def test_layers_on_a_plane(ranks: RankPool, what: str, rest: str) -> None:
    for loss, gradient, counted, predicted in ranks.run(4, differences, what, Grid(x=2, y=2), rest):
        assert loss <= 1e-12 and gradient <= 1e-12
        assert counted == predicted


@pytest.mark.parametrize("what", ["conv2d", "transposed", "norms"])
def test_layers_with_weights_sharded_over_z(ranks: RankPool, what: str) -> None:
    for loss, gradient, counted, predicted in ranks.run(4, differences, what, Grid(z=2, x=2), "sharded"):
        assert loss <= 1e-12 and gradient <= 1e-12
        assert counted == predicted


def test_a_turn_of_images(ranks: RankPool) -> None:
    for loss, gradient, counted, predicted in ranks.run(4, differences, "turned", Grid(x=2, y=2), "sharded"):
        assert loss <= 1e-12 and gradient <= 1e-12
        assert counted == predicted


def running(cut_over: Grid) -> list[list[float]]:
    """Running mean and variance of a batch norm after two steps: the rank's part, and the serial layer's."""
    network = Network(cut_over)
    with torch.device("meta"):
        plain, model = (PrefetchOrder(2, nn.Identity(), nn.BatchNorm2d(8)) for _ in range(2))
    fill = initial_values(model, 0, torch.float64)
    materialise(plain, fill)
    cut = EDGES | {"middle.1": declared.Norm()}  # type: ignore[operator]
    apply(model, cut, network, Batch(8, 1), fill)
    images = torch.arange(8 * 3 * 81, dtype=torch.float64).cos().view(8, 3, 9, 9)
    for _ in range(2):
        plain(images), model(network.share(images))
    theirs, mine = plain.middle[1], model.middle[1]
    part = partial(torch.chunk, chunks=cut_over.x)
    here = network.coordinates["x"]
    return [
        [(part(getattr(theirs, name))[here] - local_of(getattr(mine, name))).abs().max().item()]
        for name in ("running_mean", "running_var")
    ]


def test_running_statistics_are_those_of_the_whole_batch(ranks: RankPool) -> None:
    for (mean,), (variance,) in ranks.run(4, running, Grid(x=2, data=2)):
        assert mean <= 1e-12 and variance <= 1e-12


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"padding": 1, "padding_mode": "reflect"}, declared.Expand(), "padding_mode='reflect' has no form here"),
        ({"kernel_size": 2, "padding": "same"}, declared.Expand(), "pads more on one side"),
        ({"groups": 2}, declared.Expand(), "in 2 groups; the cut can take it as Grouped"),
        ({}, declared.Expand(heads=2), "cannot be cut by heads"),
    ],
)
def test_what_has_no_form_is_refused(options: dict[str, Any], kind: declared.Declared, message: str) -> None:
    with torch.device("meta"):
        model = PrefetchOrder(2, nn.Conv2d(8, 8, **{"kernel_size": 3, **options}))
    with pytest.raises(UserError, match=message):
        resolve(model, EDGES | {"middle.0": kind}, Grid(), ShardingPolicy(), Batch(2, 1))  # type: ignore[operator]
