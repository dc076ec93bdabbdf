"""The inputs of a run without values: one whole batch, and how its tensors are cut over the grid."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.parallel.config import Batch
from cubeloom.parallel.cut import CutError
from cubeloom.parallel.layout import Layout


@dataclass(frozen=True)
class Given:
    """An input that is not cut by samples over data and z in its first dimension. The layout names all dimensions."""

    tensor: Tensor
    layout: Layout


# From a number of samples to the keyword arguments of one whole batch of them.
Example = Callable[[int], Mapping[str, Any]]
_LANGUAGE = ("tokens", "targets", "next_sentence")


@dataclass(frozen=True)
class Inputs:
    """The keyword arguments of one whole batch, on the meta device."""

    tensors: dict[str, Given]
    others: dict[str, Any]  # numbers and other values, the same on every rank

    def arguments(self) -> dict[str, Any]:
        return {**{name: each.tensor for name, each in self.tensors.items()}, **self.others}


def inputs_of(model: nn.Module, batch: Batch, example: Example | None = None) -> Inputs:
    given = (example or getattr(model, "example", None) or _language(model, batch))(batch.samples)
    tensors = {name: _given(value, batch.samples) for name, value in given.items() if isinstance(value, Tensor | Given)}
    return Inputs(tensors, {name: value for name, value in given.items() if name not in tensors})


def _given(value: Tensor | Given, samples: int) -> Given:
    if not isinstance(value, Given):
        rows = ("data", "z") if value.dim() and value.shape[0] == samples else None
        dims = ((f"{place}", ("data", "z") if place == 0 and rows else ()) for place in range(value.dim()))
        value = Given(value, Layout(tuple(dims)))
    empty = torch.empty(value.tensor.shape, dtype=value.tensor.dtype, device="meta")
    return Given(empty.requires_grad_(value.tensor.requires_grad), value.layout)


def _language(model: nn.Module, batch: Batch) -> Example:
    """For a model that takes tokens, and perhaps targets."""
    taken = inspect.signature(model.forward).parameters
    required = [
        name
        for name, each in taken.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if "tokens" not in taken or not set(required) <= set(_LANGUAGE):
        raise CutError(
            f"{type(model).__name__}.forward takes {', '.join(taken) or 'nothing'}, of which no example is known, and the cut"
            " is checked by running the model once without values: pass `example`, a function from a number of samples to the"
            " keyword arguments of one whole batch, such as lambda samples: {"
            + ", ".join(f"{name!r}: torch.empty(samples, ...)" for name in required or ["x"])
            + "}"
        )

    def example(samples: int) -> dict[str, Tensor]:
        tokens = torch.empty(samples, batch.sequence, dtype=torch.long, device="meta")
        known = {"tokens": tokens, "targets": tokens.clone(), "next_sentence": tokens[:, 0]}
        # A model may accept arguments for which only some of its variants have a layer.
        return {
            name: known[name]
            for name in known
            if name in taken and (name in required or name != "next_sentence" or hasattr(model, name))
        }

    return example
