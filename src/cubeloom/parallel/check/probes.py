"""Modules that a cut replaces by its own are tried on a few numbers: they must compute what their kind says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base.turns import interleave
from cubeloom.parallel.cut import LayerError
from cubeloom.parallel.specs import ConcatSpec, CopyToRegionSpec, FirstTokenSpec, LayerSpec, LossSpec, SquaredLossSpec


def probe(spec: LayerSpec, module: nn.Module) -> None:
    """Raises LayerError, where the layer on the grid would compute something else than the module."""
    match spec:
        case LossSpec() if type(module) is not nn.CrossEntropyLoss:
            _probe_loss(spec, module)
        case CopyToRegionSpec() if type(module) is not nn.Identity:
            whole = _numbers(3, spec.features)
            _same(spec, module.forward, module, "what it is given", whole, whole)
        case SquaredLossSpec():
            first, second = _numbers(3, 4, 2), _numbers(3, 4, 2).flip(0)
            expected = (first - second).square().mean()
            _same(
                spec, module.forward, module, "the mean of squared differences of two tensors", expected, first, second
            )
        case FirstTokenSpec():
            rows = _numbers(6, 4)
            _same(spec, module.forward, module, "the first of each `sequence` rows", rows[::3], rows, 3)
        case ConcatSpec():
            first, second = _numbers(2, 2 * spec.parts, 3), _numbers(2, spec.parts, 3)
            expected = interleave(first, second, spec.parts)
            _same(spec, module.forward, module, f"features of both in {spec.parts} turns", expected, first, second)


def _probe_loss(spec: LossSpec, module: nn.Module) -> None:
    logits = _numbers(6, 5)
    for ignored in (1, spec.ignored):
        targets = torch.tensor([4, 0, ignored, 2, 1, 3], device="cpu")
        expected = functional.cross_entropy(logits, targets, ignore_index=spec.ignored, label_smoothing=spec.smoothing)
        what = f"the mean cross-entropy of logits and those targets that are not {spec.ignored}"
        _same(spec, module.forward, module, what, expected, logits, targets)
        from_hidden: Any = getattr(module, "from_hidden", None)
        if from_hidden is not None:
            head, what = nn.Linear(5, 5, bias=False, device="cpu", dtype=torch.float64), f"{what}, from hidden features"
            with torch.no_grad():
                head.weight.copy_(torch.eye(5, dtype=torch.float64, device="cpu"))
            _same(spec, from_hidden, module, what, expected, logits, head, targets)


def _numbers(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 2, count, dtype=torch.float64, device="cpu").sin().view(shape)


def _same(
    spec: LayerSpec, forward: Callable[..., Any], module: nn.Module, what: str, expected: Tensor, *arguments: Any
) -> None:
    problem = ""
    if next(module.parameters(), None) is not None:
        problem = "it has parameters"
    else:
        try:
            with torch.device("cpu"), torch.no_grad():
                found = forward(*arguments)
        except Exception as error:
            problem = f"it fails there: {type(error).__name__}: {error}"
        else:
            same = (
                isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found.double(), expected)
            )
            problem = "" if same else "on a few numbers it gives something else"
    if problem:
        raise LayerError(
            spec.name,
            f"layer {spec.name} ({type(module).__name__}) is taken for one that gives {what}, and it does not: {problem}",
        )
