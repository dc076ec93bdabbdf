"""The norm of all gradients of a model, exact over every kind of shard; and what it decides of an update.

A rank has blocks of some parameters, and other ranks may have the same block: along axes that do not cut it, and in other
replicas of its stage. Each block's squares count once: every holder gives its share of them, and one number is summed over
all ranks. So all ranks have the same norm, to the bit, and decide alike. The norm stays on the device, and the decision is
made there: a host that waited for it would leave a GPU idle until the update has been prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from cubeloom.base import torch_private
from cubeloom.comm import Network
from cubeloom.models.parallelize import handle_of
from cubeloom.parallel.arranged import arrangement_of, lie_of
from cubeloom.parallel.parameter import local_of
from cubeloom.train.sharded_optimizer import ShardedOptimizer

Holders = Callable[[str], tuple[int, ...]]  # the workers of a pipeline that hold a parameter of this name


@dataclass(frozen=True)
class GradShard:
    """A gradient on this rank, and how many ranks have the very same."""

    gradient: Tensor
    holders: int


def pieces(
    parameters: Iterable[tuple[str, nn.Parameter]],
    network: Network,
    sharded: ShardedOptimizer | None = None,
    holders: Holders | None = None,
) -> list[GradShard]:
    """The gradients that this rank has: of its blocks, or of the parts of them that it updates."""
    found = []
    for name, parameter in parameters:
        workers = 1 if holders is None else len(holders(name))
        alike = workers * prod(network.grid.size(axis) for axis in _uncut(parameter))
        if parameter.grad is not None:
            found += _by_copies(GradShard(local_of(parameter.grad), alike), parameter, network)
        elif sharded is not None and (part := sharded.parts[parameter]).tensor.grad is not None:
            assert part.tensor.grad is not None
            own = GradShard(part.tensor.grad, alike // sharded.replicas(parameter))
            found += _by_copies(own, parameter, network, part.rows)
    return found


def _by_copies(
    piece: GradShard, parameter: nn.Parameter, network: Network, rows: slice | None = None
) -> list[GradShard]:
    """Cut where rows are copies of what other ranks have, too: each of them holds the very same gradient."""
    arrangement = arrangement_of(parameter, network)
    if arrangement is None or arrangement.copies == 1:
        return [piece]
    parts = lie_of(parameter, network, rows).parts(piece.gradient)
    return [GradShard(part, piece.holders * run.copies) for run, part in parts]


def _uncut(parameter: nn.Parameter) -> list[str]:
    """The axes along which ranks hold the same block."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names or ()
    cut = {name for name, place in zip(names, parameter.placements, strict=True) if isinstance(place, Shard)}
    return [axis for axis in ("x", "y", "z", "data") if axis not in cut]


def norm_of(gradients: list[GradShard], network: Network) -> Tensor:
    """Of all gradients of the model, in float64 on the device; the same on every rank."""
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for piece in gradients:
        alike.setdefault((piece.holders, piece.gradient.dtype), []).append(piece.gradient)
    mine = torch.zeros((), dtype=torch.float64, device=network.device)
    for (holders, _), tensors in alike.items():
        norms = torch_private.norms_of(tensors, torch.float64)
        mine += torch.stack(norms).square().sum() / holders
    return network.everybody.all_reduce(mine, "gradient norm").wait().sqrt()


def clip(gradients: list[GradShard], network: Network, most: float) -> Tensor:
    """Scale all gradients so that their norm is at most this; gives the norm that they had."""
    before = norm_of(gradients, network)
    _divide(gradients, _over(before, most))
    return before


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """As torch's, for a model that was parallelized or pipelined: of all gradients, also of stages that other ranks have.

    Called by all ranks; gives the norm before.
    """
    network = handle_of(model).network
    holders: Holders | None = getattr(getattr(model, "plan", None), "holders", None)
    return clip(pieces(model.named_parameters(), network, holders=holders), network, max_norm)


def set_clip_and_skip(
    optimizer: Optimizer, gradients: list[GradShard], size: Tensor, most: float, limit: float
) -> None:
    """Let the next step of a fused optimizer change nothing if the gradients' norm `size` is above `limit` or no number;
    else let it first scale them down to a norm of `most`, if that is not 0."""
    optimizer.found_inf = (~(size <= limit)).float()  # type: ignore[attr-defined]  # 1 forbids
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    if most == 0:
        return
    if any(piece.gradient.dtype is torch.float64 for piece in gradients):
        _divide(gradients, _over(size, most))
    else:
        # In the very kernel that updates; which takes a float32, too few digits for a float64.
        optimizer.grad_scale = _over(size, most).float()  # type: ignore[attr-defined]


def _over(size: Tensor, most: float) -> Tensor:
    """By what gradients are to be divided."""
    return (size / most).clamp(min=1)


def _divide(gradients: list[GradShard], by: Tensor) -> None:
    for piece in gradients:
        # A number on a device would first be rounded to the gradient's dtype; a tensor of one dimension is not.
        gradient = piece.gradient[None]
        torch.div(gradient, by[None], out=gradient)
