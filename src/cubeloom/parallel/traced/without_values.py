"""Turns off code of Hugging Face's models that reads values, although the result does not depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Experts choose tokens by their values, in all implementations but one: that one is traced.
EXPERTS, _WITHOUT_VALUES = "_experts_implementation", "batched_mm"
# Looks for padding among the tokens, in order to warn.
_WARNS = "warn_if_padding_and_no_attention_mask"


def _silent(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def asking_no_values(model: nn.Module) -> Iterator[None]:
    """Within this context. The model computes the same."""
    modules = list(model.modules())
    configs = {id(config): config for each in modules if hasattr(config := getattr(each, "config", None), EXPERTS)}
    before = {key: getattr(config, EXPERTS) for key, config in configs.items()}
    warning = [each for each in modules if hasattr(each, _WARNS) and _WARNS not in vars(each)]
    for config in configs.values():
        setattr(config, EXPERTS, _WITHOUT_VALUES)
    for module in warning:
        setattr(module, _WARNS, _silent)
    try:
        yield
    finally:
        for key, config in configs.items():
            setattr(config, EXPERTS, before[key])
        for module in warning:
            delattr(module, _WARNS)
