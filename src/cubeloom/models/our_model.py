"""Our own models as a source: a configuration, and the name of its preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cubeloom.models.configs import BERTConfig, Config, GPTConfig, LlamaConfig, ResNetConfig, UNetConfig
from cubeloom.models.cuts import cut_of
from cubeloom.models.description import describe
from cubeloom.models.modules import Model, build
from cubeloom.models.naming import Naming
from cubeloom.models.presets import config
from cubeloom.models.random_samples import random_samples
from cubeloom.parallel import Batch, Cut, initial_values
from cubeloom.parallel.replace import Fill


@dataclass(frozen=True)
class OurModel:
    """A `ModelSource`."""

    config: Config
    preset: str | None = None

    @property
    def name(self) -> str:
        return self.preset or describe(self.config)["family"]

    @property
    def positions(self) -> int | None:
        return getattr(self.config, "positions", None)

    @property
    def vocabulary(self) -> int | None:
        return getattr(self.config, "vocab", None)

    @property
    def traced(self) -> bool:
        return False

    def build(self) -> Model:
        return build(self.config)

    def cut(self, model: nn.Module) -> Cut:
        return cut_of(model)

    def fill(self, model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> Fill:
        return initial_values(cast(Model, model), seed, dtype, device)

    def samples(self, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return random_samples(self.config, batch, seed, step, dtype)

    @property
    def naming(self) -> Naming:
        match self.config:
            case GPTConfig() | LlamaConfig():
                return Naming("tokens", (("tokens", "tokens"), ("targets", "targets")))
            case BERTConfig():
                return Naming("masked-tokens", (("tokens", "tokens"), ("targets", "targets")))
            case ResNetConfig():
                return Naming("images", (("images", "images"), ("targets", "targets")))
            case UNetConfig():
                return Naming("noised-images", (("images", "images"), ("noise", "noise"), ("times", "times")))

    def describe(self) -> dict[str, Any]:
        return describe(self.config)


def preset(name: str) -> OurModel:
    """An unchanged preset. Raises UserError with the nearest name."""
    return OurModel(config(name), name)
