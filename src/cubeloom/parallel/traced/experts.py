"""Code of Hugging Face's that asks for values where a model can be traced without.

Experts choose tokens by their values, in all implementations but one: that one is traced. And a warning looks for padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_SETTING = "_experts_implementation"
_WITHOUT_VALUES = "batched_mm"
_WARNS = "warn_if_padding_and_no_attention_mask"


@contextmanager
def experts_without_values(model: nn.Module) -> Iterator[None]:
    """For as long as this lasts; all implementations compute the same, and nothing warns."""
    configs = {
        id(config): config for each in model.modules() if hasattr(config := getattr(each, "config", None), _SETTING)
    }
    before = {key: getattr(config, _SETTING) for key, config in configs.items()}
    for config in configs.values():
        setattr(config, _SETTING, _WITHOUT_VALUES)
    warning = [each for each in model.modules() if hasattr(type(each), _WARNS)]
    for each in warning:
        vars(each)[_WARNS] = lambda *_, **__: None
    try:
        yield
    finally:
        for each in warning:
            vars(each).pop(_WARNS, None)
        for key, config in configs.items():
            setattr(config, _SETTING, before[key])
