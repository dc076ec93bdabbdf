"""A model's configuration as JSON, so that a checkpoint can describe its model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.settings.convert import convert
from cubeloom.models.configs import BERTConfig, Config, GPTConfig, LlamaConfig, ResNetConfig, UNetConfig

FAMILIES: dict[str, type[Config]] = {
    "gpt": GPTConfig,
    "llama": LlamaConfig,
    "bert": BERTConfig,
    "unet": UNetConfig,
    "resnet": ResNetConfig,
}


def describe(config: Config) -> dict[str, Any]:
    """The family and every field that is set. `config_from` is the inverse, also after conversion to JSON and back."""
    family = next(name for name, kind in FAMILIES.items() if isinstance(config, kind))
    return {"family": family, **{name: value for name, value in asdict(config).items() if value is not None}}


def config_from(description: Mapping[str, Any]) -> Config:
    """Missing fields have their defaults; unknown ones are refused."""
    fields = dict(description)
    family = fields.pop("family", None)
    if not isinstance(family, str) or family not in FAMILIES:
        nearest = difflib.get_close_matches(str(family), FAMILIES, n=1, cutoff=0.0)[0]
        raise UserError(
            f"unknown family of models {family!r}; did you mean {nearest!r}? The families are {', '.join(FAMILIES)}"
        )
    return convert(FAMILIES[family], fields, "model.")
