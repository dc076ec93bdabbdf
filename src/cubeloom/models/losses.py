"""Losses for models that do not compute their own: functions of the model's output and the targets.

Both are means over the whole batch. Other losses of torch.nn.functional are as well, if they are means over elements.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base.errors import UserError
from cubeloom.models.example import TARGET_NAMES

Loss = Callable[[Any, Tensor], Tensor]
"""From a forward's output, or its `logits` if it has such, and the targets, to the mean over the batch."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over targets that are not -100, of logits `[..., classes]`."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def mse(output: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error."""
    return functional.mse_loss(output, targets)


def with_loss(model: nn.Module, loss: Loss) -> nn.Module:
    """The same module, whose forward takes targets as well and returns their loss."""
    kind = type(model)
    signature = inspect.signature(kind.forward)
    taken = list(signature.parameters.values())
    targets = next((name for name in TARGET_NAMES if name in signature.parameters), None)
    if targets is not None and signature.parameters[targets].default is inspect.Parameter.empty:
        raise UserError(f"{kind.__name__}.forward needs {targets}: it computes its own loss, so leave model.loss out")
    if targets is None:
        targets = TARGET_NAMES[1]
        by_name = [each for each in taken if each.kind is not inspect.Parameter.VAR_KEYWORD]
        added = inspect.Parameter(targets, inspect.Parameter.KEYWORD_ONLY)
        taken = [*by_name, added, *taken[len(by_name) :]]

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *arguments: Any, **given: Any) -> Tensor:
        wanted = given.pop(targets)
        output = kind.forward(self, *arguments, **given)
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        return loss(output if logits is None else logits, wanted)

    forward.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model
