"""Computes buffers that are in no file, such as rotary tables, for a model on the meta device."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError


def compute_buffers(model: nn.Module) -> None:
    """As Hugging Face's models compute them. Raises UserError for a model that does not say how."""
    initialise = getattr(model, "_init_weights", None)
    for name, module in model.named_modules():
        own = torch_private.buffers_of(module)
        empty = {kind: each for kind, each in own.items() if each is not None and each.is_meta}
        if not empty:
            continue
        if initialise is None or not inspect.ismethod(initialise):
            kind = next(iter(empty))
            raise UserError(
                f"buffer {name}.{kind} is on the meta device, and nothing says what it holds: build the model on the CPU, or"
                " give `parallelize` a `fill`"
            )
        own.update({kind: torch.zeros_like(each, device="cpu") for kind, each in empty.items()})
        with torch.device("cpu"), torch.no_grad():
            initialise(module)
