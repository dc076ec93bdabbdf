"""Runs modules that the cut replaces by other implementations on a few numbers: they must compute what their kind says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from cubeloom.base.turns import interleave, order
from cubeloom.parallel.cut import LayerError
from cubeloom.parallel.specs import (
    ConcatSpec,
    CopyToRegionSpec,
    FirstTokenSpec,
    ImageNormSpec,
    LayerSpec,
    LossSpec,
    SquaredLossSpec,
)


def probe(spec: LayerSpec, module: nn.Module) -> None:
    """Raises LayerError if the layer on the grid would compute something else than the module."""
    match spec:
        case LossSpec() if type(module) is not nn.CrossEntropyLoss:
            _probe_loss(spec, module)
        case CopyToRegionSpec() if type(module) is not nn.Identity:
            _probe_function(spec, module)
        case ImageNormSpec(joined=joined) if joined is not None:
            _probe_norm(spec, module, torch.tensor(order(*joined), device="cpu"))
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
            one, two = _numbers(2, 2 * spec.turns, 3), _numbers(2, spec.turns, 3)
            expected = interleave(one, two, spec.turns)
            _same(spec, module.forward, module, f"features of both in {spec.turns} turns", expected, one, two)


def _probe_loss(spec: LossSpec, module: nn.Module) -> None:
    logits = _numbers(6, 5)
    for ignored in (1, spec.ignored):
        targets = torch.tensor([4, 0, ignored, 2, 1, 3], device="cpu")
        expected = functional.cross_entropy(logits, targets, ignore_index=spec.ignored, label_smoothing=spec.smoothing)
        what = f"the mean cross-entropy of logits and those targets that are not {spec.ignored}"
        _same(spec, module.forward, module, what, expected, logits, targets)


def _probe_function(spec: CopyToRegionSpec, module: nn.Module) -> None:
    whole = _numbers(3, spec.features)

    def one_by_one() -> Tensor:
        return torch.cat([module(column) for column in whole.split(1, dim=-1)], dim=-1)

    what = "a function of each number alone"
    try:
        with torch.device("cpu"), torch.no_grad():
            expected = one_by_one()
    except Exception:
        expected = whole  # it takes features unchanged: the comparison finds the error
    _same(spec, module.forward, module, what, expected, whole)


def _probe_norm(spec: ImageNormSpec, module: nn.Module, place: Tensor) -> None:
    assert isinstance(module, nn.GroupNorm)
    x = _numbers(2, spec.features, 3)
    grouped = functional.group_norm(x[:, place.argsort()], module.num_groups, eps=module.eps)[:, place]
    values = {name: _numbers(spec.features) + number for number, (name, _) in enumerate(module.named_parameters())}
    if values:
        grouped = grouped * values["weight"][:, None] + values["bias"][:, None]

    def forward(x: Tensor) -> Any:
        return functional_call(module, values, (x[..., None],)).squeeze(-1)

    what = f"a group norm of features of two tensors, joined={spec.joined}"
    _same(spec, forward, module, what, grouped, x)


def _numbers(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 2, count, dtype=torch.float64, device="cpu").sin().view(shape)


def _same(
    spec: LayerSpec, forward: Callable[..., Any], module: nn.Module, what: str, expected: Tensor, *arguments: Any
) -> None:
    problem = ""
    if forward == module.forward and next(module.parameters(), None) is not None:
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
