"""Hugging Face's experts choose tokens by their values, in all implementations but one: that one is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_SETTING = "_experts_implementation"
_WITHOUT_VALUES = "batched_mm"


@contextmanager
def experts_without_values(model: nn.Module) -> Iterator[None]:
    """For as long as this lasts; all implementations compute the same."""
    configs = {
        id(config): config for each in model.modules() if hasattr(config := getattr(each, "config", None), _SETTING)
    }
    before = {key: getattr(config, _SETTING) for key, config in configs.items()}
    for config in configs.values():
        setattr(config, _SETTING, _WITHOUT_VALUES)
    try:
        yield
    finally:
        for key, config in configs.items():
            setattr(config, _SETTING, before[key])
