"""A model's configuration as JSON, so that a checkpoint can describe its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cubeloom.base.registry import Registry
from cubeloom.base.settings.convert import convert
from cubeloom.models.configs import BERTConfig, Config, GPTConfig, LlamaConfig, ResNetConfig, UNetConfig

_FAMILIES: dict[str, type[Config]] = {
    "gpt": GPTConfig,
    "llama": LlamaConfig,
    "bert": BERTConfig,
    "unet": UNetConfig,
    "resnet": ResNetConfig,
}
FAMILIES: Registry[type[Config]] = Registry("family of models", _FAMILIES)


def describe(config: Config) -> dict[str, Any]:
    """The family and every field that is set. `config_from` is the inverse, also after conversion to JSON and back."""
    family = next(name for name, kind in FAMILIES.items() if isinstance(config, kind))
    return {"family": family, **{name: value for name, value in asdict(config).items() if value is not None}}


def config_from(description: Mapping[str, Any]) -> Config:
    """Missing fields have their defaults; unknown ones are refused."""
    fields = dict(description)
    return convert(FAMILIES.find(str(fields.pop("family", None))), fields, "model.")
