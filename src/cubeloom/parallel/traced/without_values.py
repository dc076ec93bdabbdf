"""Makes code of models visible to a run without values, or turns it off if the result does not depend on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cubeloom.base import torch_private

# Experts choose tokens by their values, in all implementations but one: that one is traced.
EXPERTS, _WITHOUT_VALUES = "_experts_implementation", "batched_mm"
# Looks for padding among the tokens, in order to warn.
_WARNS = "warn_if_padding_and_no_attention_mask"


def _silent(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def asking_no_values(model: nn.Module) -> Iterator[None]:
    """Within this context. The model computes the same.

    A scripted function's operations are not seen; those of the Python function it was made from are.
    """
    modules = list(model.modules())
    configs = {id(config): config for each in modules if hasattr(config := getattr(each, "config", None), EXPERTS)}
    before = {key: getattr(config, EXPERTS) for key, config in configs.items()}
    warning = [each for each in modules if hasattr(each, _WARNS) and _WARNS not in vars(each)]
    for config in configs.values():
        setattr(config, EXPERTS, _WITHOUT_VALUES)
    for module in warning:
        setattr(module, _WARNS, _silent)
    scripted = _scripted(modules)
    for names, name, function in scripted:
        names[name] = torch_private.source_of_scripted(function)
    try:
        yield
    finally:
        for names, name, function in scripted:
            names[name] = function
        for key, config in configs.items():
            setattr(config, EXPERTS, before[key])
        for module in warning:
            delattr(module, _WARNS)


def _scripted(modules: list[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """The functions of `torch.jit.script` in the Python modules that define these: the module's names, name, function."""
    files = {type(each).__module__ for each in modules} & sys.modules.keys()
    return [
        (vars(sys.modules[file]), name, value)
        for file in sorted(files)
        for name, value in vars(sys.modules[file]).items()
        if isinstance(value, torch.jit.ScriptFunction) and torch_private.source_of_scripted(value) is not None
    ]
