"""Where a model comes from: all that training, verifying and planning ask of one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cubeloom.parallel import AnyCut, Batch
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

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of it, as JSON."""
        ...


def skeleton(source: ModelSource) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        return source.build()
