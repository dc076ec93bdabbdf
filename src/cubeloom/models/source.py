"""Where a model comes from: all that training, verifying and planning ask of one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.models.naming import Naming
from cubeloom.parallel import AnyCut, Batch, ShardingPolicy
from cubeloom.parallel.config import Activations, GradientDtype, Inputs, Weights
from cubeloom.parallel.replace import Fill


class ModelSource(Protocol):
    """A model that can be built, cut, filled and fed. `OurModel` is the one of our presets.

    A source is a value: frozen, and pickled to every rank. `cut` and `fill` are given a module that `build` made; `build`
    is called under `torch.device("meta")`.
    """

    @property
    def name(self) -> str:
        """As the user called it."""
        ...

    @property
    def positions(self) -> int | None:
        """The longest sequence that a sample may have; None where samples are no sequences."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """Tokens that it knows; None where samples have no tokens."""
        ...

    @property
    def traced(self) -> bool:
        """Nobody wrote its cut: it is found."""
        ...

    def build(self) -> nn.Module:
        """The module. Its forward takes a batch by keyword and returns the mean loss; `pieces` says how stages cut it."""
        ...

    def cut(self, model: nn.Module) -> AnyCut:
        """How each of its layers lies on the grid."""
        ...

    def fill(self, model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> Fill:
        """The values that its parameters start with: the same on any grid."""
        ...

    def samples(self, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """A batch of random samples as the forward names them, the first dimension of each: the same on any grid."""
        ...

    @property
    def naming(self) -> Naming:
        """What it learns from, and how its forward names that."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of it, as JSON."""
        ...


def skeleton(source: ModelSource) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        return source.build()


def sharding_policy(
    source: ModelSource, activations: Activations | None, weights: Weights, inputs: Inputs, gradients: GradientDtype
) -> ShardingPolicy:
    """With the activations that suit the model, unless they are said. Raises UserError for what a traced model cannot have."""
    if source.traced:
        _refuse(source, "activations sharded between layers", activations == "sharded")
        _refuse(source, "inputs that are gathered again", inputs == "regathered")
    chosen = activations or ("replicated" if source.traced else "sharded")
    return ShardingPolicy(activations=chosen, weights=weights, inputs=inputs, gradients=gradients)


def check_options(source: ModelSource, ways: int, compile: bool) -> None:
    """Raises UserError for what a traced model cannot do yet."""
    if source.traced:
        _refuse(source, "strands (ways > 1)", ways > 1)
        _refuse(source, "compile", compile)


def _refuse(source: ModelSource, what: str, wanted: bool) -> None:
    if wanted:
        raise UserError(
            f"model {source.name!r} has no cut that somebody wrote, and {what} is for those that have one: leave it out, or let"
            " the function of a .py file return a pair of the model and its cut"
        )
