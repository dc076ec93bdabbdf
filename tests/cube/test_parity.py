"""Training on a grid is training the serial model: loss, gradients, weights to 1e-10, and not a byte more than predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from typing import Any, cast

import pytest
import torch
from torch import nn

from cubeloom import Grid
from cubeloom.base.grid import AXES
from cubeloom.base.initial import Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import BERTConfig, Config, GPTConfig, OurModel, config, preset
from cubeloom.parallel import (
    Batch,
    Contract,
    Cut,
    Embedding,
    Expand,
    Loss,
    Norm,
    ShardingPolicy,
    apply,
    initial_values,
    materialise,
)
from cubeloom.tools.verify import Experiment
from grids import CUBES, MODELS, RESTS, SAMPLE, SAMPLE_WITH_DATA, WITH_DATA, rest_is_long
from parity import holds
from serial_runs import Verified

GPT_TINY = cast(GPTConfig, config("gpt-tiny"))

pytestmark = pytest.mark.timeout(120)


def experiment(model: str | Config, grid: str | Grid, rest: ShardingPolicy | None = None, **changes: Any) -> Experiment:
    on = Grid.parse(grid) if isinstance(grid, str) else grid
    chosen = {"batch": Batch(2 * on.data * on.z, 24), "steps": 2, "rest": rest or ShardingPolicy(), **changes}
    return Experiment(model=OurModel(config(model) if isinstance(model, str) else model), grid=on, **chosen)


def in_turn(grids: list[str]) -> list[tuple[str, str, str]]:
    """Each grid once, with models and rest modes in turn; the long suite has all of them."""
    cases = cycle(product(MODELS, RESTS))
    return [(grid, *next(cases)) for grid in grids]


@pytest.mark.parametrize(("grid", "model", "rest"), in_turn(SAMPLE))
def test_every_axis_and_every_two(verified: Verified, grid: str, model: str, rest: Any) -> None:
    holds(verified(experiment(model, grid, ShardingPolicy(activations=rest))))


@pytest.mark.parametrize(("grid", "model", "rest"), in_turn(SAMPLE_WITH_DATA))
def test_data_parallelism_of_cubes(verified: Verified, grid: str, model: str, rest: Any) -> None:
    holds(verified(experiment(model, grid, ShardingPolicy(activations=rest))))


@pytest.mark.long
@pytest.mark.parametrize("grid", [*CUBES, *WITH_DATA])
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_every_grid(verified: Verified, model: str, rest: Any, grid: str) -> None:
    holds(verified(experiment(model, grid, ShardingPolicy(activations=rest), steps=3)))


# Each two of the settings together on the cube, and what is left over on the smaller grid.
AT_REST = [
    ("x=2,y=2,z=2", "sharded", "kept", "kept"),
    ("x=2,y=2,z=2", "sharded", "replicated", "regathered"),
    ("x=2,y=2,z=2", "replicated", "kept", "regathered"),
    ("x=2,y=2,z=2", "replicated", "replicated", "kept"),
    ("data=2,z=2", "sharded", "kept", "regathered"),
    ("data=2,z=2", "replicated", "replicated", "regathered"),
]


@pytest.mark.parametrize(
    ("grid", "rest", "weights", "inputs"),
    rest_is_long(
        product(["x=2,y=2,z=2", "data=2,z=2"], RESTS, ["kept", "replicated"], ["kept", "regathered"]), AT_REST
    ),
)
def test_weights_and_inputs_at_rest(verified: Verified, grid: str, rest: Any, weights: Any, inputs: Any) -> None:
    chosen = ShardingPolicy(activations=rest, weights=weights, inputs=inputs)
    holds(verified(experiment("gpt-tiny", grid, chosen)))


@pytest.mark.parametrize("placement", [("x", "y", "z", "data", "pipe"), ("data", "y", "pipe", "z", "x")])
def test_any_axis_may_be_innermost(verified: Verified, placement: tuple[str, ...]) -> None:
    assert set(placement) == set(AXES)
    holds(verified(experiment("bert-tiny", Grid(x=2, y=2, z=2, placement=placement))))


@pytest.mark.parametrize(
    "grid",
    rest_is_long(
        ["data=2", "data=4", "data=2,x=2,y=2", "data=2,z=2", "data=3,z=2"], ["data=4", "data=2,x=2,y=2", "data=3,z=2"]
    ),
)
def test_sharded_optimizer_state(verified: Verified, grid: str) -> None:
    holds(verified(experiment("gpt-tiny", grid, zero=True)))


@pytest.mark.parametrize(
    ("grid", "rest"),
    rest_is_long(
        product(["x=2,y=2", "x=4,y=2", "x=2,z=2"], RESTS),
        [("x=2,y=2", "replicated"), ("x=4,y=2", "sharded"), ("x=2,z=2", "sharded")],
    ),
)
def test_where_heads_do_not_suffice_whole_sequences_are_spread(verified: Verified, grid: str, rest: Any) -> None:
    """Two heads for x·y = 4 and 8 ranks: y takes the heads and x the sequences."""
    two_heads = replace(cast(GPTConfig, config("gpt-tiny")), heads=2)
    on = Grid.parse(grid)
    holds(verified(experiment(two_heads, on, ShardingPolicy(activations=rest), batch=Batch(4 * on.z, 24))))


@pytest.mark.parametrize(
    ("grid", "rest"),
    rest_is_long(
        product(["x=2,y=2", "x=2,z=2", "data=2,y=2,x=2", "x=4,y=2", "x=2,y=3"], RESTS),
        [("x=2,y=2", "replicated"), ("x=2,z=2", "sharded"), ("x=2,y=3", "sharded"), ("x=2,y=3", "replicated")],
    ),
)
def test_bert_with_next_sentence_and_its_own_decoder(verified: Verified, grid: str, rest: Any) -> None:
    """As Bert-48 is; on planes that are not square, where ranks receive unequal parts in the turn before the decoder."""
    whole = replace(cast(BERTConfig, config("bert-tiny")), next_sentence=True, tied=False)
    holds(verified(experiment(whole, grid, ShardingPolicy(activations=rest))))


DROPPED = [
    ("gpt-tiny", "sharded", "x=2,y=2,z=2"),
    ("bert-tiny", "sharded", "data=2,y=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rest", "grid"),
    rest_is_long(product(["gpt-tiny", "bert-tiny"], RESTS, ["x=2,y=2,z=2", "data=2,y=2", "z=4"]), DROPPED),
)
def test_dropout_masks_do_not_depend_on_the_grid(verified: Verified, model: str, rest: Any, grid: str) -> None:
    dropped = replace(cast(GPTConfig | BERTConfig, config(model)), dropout=0.3)
    report = verified(experiment(dropped, grid, ShardingPolicy(activations=rest)))
    holds(report)
    without = verified(replace(report.experiment, model=preset(model), grid=Grid()))
    assert abs(report.losses[0] - without.losses[0]) > 1e-6


@pytest.mark.parametrize("grid", rest_is_long(["x=2,y=2", "y=4", "z=2,y=2"], ["y=4", "z=2,y=2"]))
def test_label_smoothing(verified: Verified, grid: str) -> None:
    smoothed = replace(GPT_TINY, label_smoothing=0.2)
    holds(verified(experiment(smoothed, grid)))


@pytest.mark.long
@pytest.mark.parametrize("grid", ["x=2,y=2,z=2", "data=2,x=2"])
def test_in_bfloat16_the_loss_stays_within_the_spread_of_two_serial_seeds(verified: Verified, grid: str) -> None:
    """50 steps on one repeated batch, so that there is something to learn; another seed starts from other weights."""
    halved = experiment("gpt-tiny", grid, steps=50, repeat=True, dtype=torch.bfloat16, learning_rate=3e-4)
    report = verified(halved)
    other = verified(replace(halved, grid=Grid(), initial_seed=1))
    ours, serial, another = (torch.tensor(losses) for losses in (report.losses, report.serial_losses, other.losses))
    spread = (serial - another).abs().max()
    assert (ours - serial).abs().max() <= spread
    assert ours[-1] < ours[0] - 0.05
    assert report.bytes_agree


class Small(nn.Module):
    """What torch's own layers offer besides: an RMSNorm with the default epsilon, a loss that ignores another target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 16)
        self.loss = nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.loss(self.head(x + self.down(self.up(self.norm(x)).relu())), tokens)

    def initial(self, name: str) -> Normal:
        return Normal(0.3)


SMALL_CUT: Cut = {
    "embed": Embedding(),
    "norm": Norm(),
    "up": Expand(),
    "down": Contract(),
    "head": Expand(sharded_output=True),
    "loss": Loss(),
}


def small_loss(grid: Grid | None) -> float:
    with torch.device("meta"):
        model = Small()
    fill = initial_values(model, 0, torch.float64)
    tokens = torch.arange(48) * 5 % 16
    if grid is None:
        return materialise(model, fill)(tokens).item()
    network = Network(grid)
    apply(
        model, SMALL_CUT, network, Batch(48, 1), fill, example=lambda samples: {"tokens": torch.empty(samples).long()}
    )
    return model(network.share(tokens)).item()


@pytest.mark.parametrize("grid", ["x=2,y=2", "z=2,y=2"])
def test_torch_s_own_layers_with_their_defaults(ranks: RankPool, grid: str) -> None:
    (serial,) = ranks.run(1, small_loss, None)
    assert ranks.run(4, small_loss, Grid.parse(grid)) == pytest.approx([serial] * 4, rel=1e-13)
