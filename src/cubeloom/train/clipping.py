"""The norm of all gradients of a model, exact over every kind of shard, and gradients scaled down to a largest norm.

A rank has blocks of some parameters, and other ranks may have the same block: along axes that do not cut it, and in other
replicas of its stage. Each block's squares count once: every holder gives its share of them, and one number is summed over
all ranks. So all ranks have the same norm, to the bit, and scale alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from cubeloom.comm import Network
from cubeloom.cube.parameter import local_of
from cubeloom.train.sharded_optimizer import ShardedOptimizer

Holders = Callable[[str], tuple[int, ...]]  # the workers of a pipeline that hold a parameter of this name


@dataclass(frozen=True)
class Piece:
    """A gradient on this rank, and how many ranks have the very same."""

    gradient: Tensor
    holders: int


def pieces(
    parameters: Iterable[tuple[str, nn.Parameter]],
    network: Network,
    sharded: ShardedOptimizer | None = None,
    holders: Holders | None = None,
) -> list[Piece]:
    """The gradients that this rank has: of its blocks, or of the parts of them that it updates."""
    found = []
    for name, parameter in parameters:
        workers = 1 if holders is None else len(holders(name))
        alike = workers * prod(network.grid.size(axis) for axis in _uncut(parameter))
        if parameter.grad is not None:
            found.append(Piece(local_of(parameter.grad), alike))
        elif sharded is not None and (part := sharded.parts[parameter].tensor).grad is not None:
            assert part.grad is not None
            found.append(Piece(part.grad, alike // sharded.replicas(parameter)))
    return found


def _uncut(parameter: nn.Parameter) -> list[str]:
    """The axes along which ranks hold the same block."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names or ()
    cut = {name for name, place in zip(names, parameter.placements, strict=True) if isinstance(place, Shard)}
    return [axis for axis in ("x", "y", "z", "data") if axis not in cut]


def norm(gradients: list[Piece], network: Network) -> float:
    """Of all gradients of the model; the same on every rank."""
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for piece in gradients:
        alike.setdefault((piece.holders, piece.gradient.dtype), []).append(piece.gradient)
    mine = torch.zeros((), dtype=torch.float64, device=network.device)
    for (holders, _), tensors in alike.items():
        norms = torch._foreach_norm(tensors, dtype=torch.float64)  # a few kernels for all of them
        mine += torch.stack(norms).square().sum() / holders
    return network.everybody.all_reduce(mine, "gradient norm").wait().sqrt().item()


def clip(gradients: list[Piece], network: Network, most: float) -> float:
    """Scale all gradients so that their norm is at most this; gives the norm that they had."""
    before = norm(gradients, network)
    if before > most:
        scale(gradients, most / before)
    return before


def scale(gradients: list[Piece], factor: float) -> None:
    if gradients:
        torch._foreach_mul_([piece.gradient for piece in gradients], factor)
