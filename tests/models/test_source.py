"""A source is all that a model needs to be verified on a grid: one that is not ours, too."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cubeloom import Grid, UserError
from cubeloom.models import OurModel, preset, skeleton
from cubeloom.models.description import config_from
from cubeloom.models.naming import OWN, Naming
from cubeloom.parallel import Batch, Contract, Cut, Embedding, Expand, Loss
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.replace import Fill
from cubeloom.tools.verify import Experiment
from serial_runs import Verified


class NextToken(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 16)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())
        return self.loss(self.head(x + self.narrow(torch.relu(self.wide(x)))), targets.flatten())


@dataclass(frozen=True)
class Theirs:
    """A model of somebody else's: its values are counted, not drawn, and it knows no configuration of ours."""

    width: int
    name: str = "theirs"
    positions: int | None = 8
    vocabulary: int | None = 16
    traced: bool = False
    naming: Naming = OWN

    def build(self) -> nn.Module:
        return NextToken(self.width)

    def cut(self, model: nn.Module) -> Cut:
        return {
            "embed": Embedding(),
            "wide": Expand(),
            "narrow": Contract(),
            "head": Expand(sharded_output=True),
            "loss": Loss(head="head"),
        }

    def fill(self, model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> Fill:
        def fill(name: str, block: Block) -> Tensor:
            numbers = torch.arange(torch.Size(block.shape).numel(), dtype=dtype, device=device).view(block.shape)
            return torch.sin(numbers + seed)[block.slices]

        return fill

    def samples(self, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
        tokens = (torch.arange(batch.samples * batch.sequence) * (seed + 3) + step).view(batch.samples, batch.sequence)
        return {"tokens": tokens % 16, "targets": (tokens + 1) % 16}

    def describe(self) -> dict[str, Any]:
        return {"width": self.width}


def test_a_source_of_another_kind_trains_as_its_serial_model(verified: Verified) -> None:
    report = verified(Experiment(model=Theirs(8), grid=Grid(x=2, y=2), batch=Batch(4, 8)))
    assert report.ok and report.losses[0] != report.losses[-1]


def test_of_ours_a_checkpoint_says_which_it_is() -> None:
    ours = preset("gpt-tiny")
    assert config_from(ours.describe()) == ours.config
    assert (ours.name, OurModel(ours.config).name) == ("gpt-tiny", "gpt")
    assert (ours.positions, ours.vocabulary) == (64, 384)
    images = preset("resnet-tiny")
    assert (images.positions, images.vocabulary) == (None, None)
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert {each.device.type for each in skeleton(ours).parameters()} == {"meta"}


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'resnet-tiny'"):
        preset("resnet-tini")
