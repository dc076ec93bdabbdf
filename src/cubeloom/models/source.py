"""The interface of a model's source, which training, verifying and planning use."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.models.naming import Naming
from cubeloom.parallel import AnyCut, Batch, ShardingPolicy
from cubeloom.parallel.config import Activations, GradientDtype, Inputs, Precision, Weights
from cubeloom.parallel.replace import Fill


class ModelSource(Protocol):
    """A model that can be built, cut, filled and fed. `OurModel` implements it for our presets.

    A source is a value: frozen, and pickled to every rank. `cut` and `fill` get a module that `build` created; `build`
    is called under `torch.device("meta")`.
    """

    @property
    def name(self) -> str:
        """The name that the user gave."""
        ...

    @property
    def positions(self) -> int | None:
        """The longest sequence of a sample; None if samples are not sequences."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """The size of its vocabulary; None if samples have no tokens."""
        ...

    @property
    def traced(self) -> bool:
        """Whether its cut is found by tracing."""
        ...

    def build(self) -> nn.Module:
        """The module. Its forward takes a batch by keyword and returns the mean loss; `pieces` lists what stages
        consist of.
        """
        ...

    def cut(self, model: nn.Module) -> AnyCut:
        """The cut: how each of its layers is sharded."""
        ...

    def fill(self, model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> Fill:
        """The initial values of its parameters: the same on any grid."""
        ...

    def samples(self, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """A batch of random samples with the forward's names, cut by the first dimension: the same on any grid."""
        ...

    @property
    def naming(self) -> Naming:
        """What it is trained on, with the names of its forward."""
        ...

    def describe(self) -> dict[str, Any]:
        """A checkpoint's description of it, as JSON."""
        ...


def skeleton(source: ModelSource) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        return source.build()


def sharding_policy(
    source: ModelSource,
    activations: Activations | None,
    weights: Weights,
    inputs: Inputs,
    gradients: GradientDtype,
    precision: Precision = "model",
) -> ShardingPolicy:
    """With the activations that suit the model, unless they are given. Raises UserError for policies a traced model
    cannot have.
    """
    if source.traced:
        _refuse(source, "activations sharded between layers", activations == "sharded")
        _refuse(source, "inputs that are gathered again", inputs == "regathered")
        _refuse(source, 'precision = "fp8"', precision == "fp8")
    chosen = activations or ("replicated" if source.traced else "sharded")
    return ShardingPolicy(activations=chosen, weights=weights, inputs=inputs, gradients=gradients, precision=precision)


def _refuse(source: ModelSource, what: str, wanted: bool) -> None:
    if wanted:
        raise UserError(
            f"model {source.name!r} has no cut that somebody wrote, and {what} is for those that have one: leave it out, or let"
            " the function of a .py file return a pair of the model and its cut"
        )
