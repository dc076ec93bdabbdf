"""Measures the costs of a model's pieces, to balance stages by time on this machine and not by counted multiplications."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from statistics import median

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.comm import devices
from cubeloom.models.pieces import Carry, Piece
from cubeloom.parallel import materialise
from cubeloom.parallel.replace import Fill


def measured_costs(
    model: nn.Module, fill: Fill, data: Mapping[str, Tensor], device: torch.device, repeats: int = 5
) -> list[float]:
    """Seconds of forward and backward of each piece on one micro-batch, the median of some runs.

    `model` is on the meta device: pieces get values one at a time, so that only one must fit into memory. Measure on
    one rank and send the stages to all: `partition(costs, stages)` must give the same everywhere.
    """
    if not hasattr(model, "pieces"):
        raise UserError(f"{type(model).__name__} does not say its pieces, so that they cannot be timed one by one")
    carry: Carry = {}
    costs = []
    for number in range(len(_pieces(model))):
        piece = _alone(model, number, fill)
        # Once to warm up, and to get the output.
        _, after = _timed(piece, carry, data, device)
        costs.append(median(_timed(piece, carry, data, device)[0] for _ in range(repeats)))
        carry = after
    return costs


def _pieces(model: nn.Module) -> list[Piece]:
    pieces: list[Piece] = model.pieces()  # type: ignore[operator]
    return pieces


def _alone(model: nn.Module, number: int, fill: Fill) -> Piece:
    """A piece with values; the rest of the model stays on the meta device."""
    own = deepcopy(model)
    piece = _pieces(own)[number]
    materialise(own, fill, piece.modules)
    return piece


def _timed(piece: Piece, carry: Carry, data: Mapping[str, Tensor], device: torch.device) -> tuple[float, Carry]:
    inputs = {name: tensor.detach().requires_grad_(tensor.is_floating_point()) for name, tensor in carry.items()}
    devices.settle(device)
    start = time.perf_counter()
    outputs = piece.run(inputs, data)
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
    devices.settle(device)
    return time.perf_counter() - start, outputs
