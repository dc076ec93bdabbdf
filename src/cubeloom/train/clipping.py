"""The norm of all gradients of a model, exact over every kind of shard, and its use for clipping and skipping updates.

A rank has blocks of some parameters. Other ranks may have the same block: along axes that do not cut it, and in other
replicas of its stage. Each block must count once, so every holder contributes its share of the squares, and one number
is all-reduced over all ranks. All ranks then have the same norm, bit for bit, and decide alike. The norm and the
decision stay on the device: if the host waited for them, the GPU would idle until the update was launched.
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

Holders = Callable[[str], tuple[int, ...]]  # the pipeline workers that hold a parameter of this name


@dataclass(frozen=True)
class GradShard:
    """A gradient on this rank, and the number of ranks with the same one."""

    gradient: Tensor
    holders: int


def pieces(
    parameters: Iterable[tuple[str, nn.Parameter]],
    network: Network,
    sharded: ShardedOptimizer | None = None,
    holders: Holders | None = None,
) -> list[GradShard]:
    """The gradients of this rank: of its blocks, or of the parts of them that it updates."""
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
    """Split a gradient whose rows are copies of other ranks' rows: each of these ranks has the same gradient."""
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
    """The norm of all gradients of the model, in float64 on the device; the same on every rank."""
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for piece in gradients:
        alike.setdefault((piece.holders, piece.gradient.dtype), []).append(piece.gradient)
    mine = torch.zeros((), dtype=torch.float64, device=network.device)
    for (holders, _), tensors in alike.items():
        norms = torch_private.norms_of(tensors, torch.float64)
        mine += torch.stack(norms).square().sum() / holders
    return network.everybody.all_reduce(mine, "gradient norm").wait().sqrt()


def clip(gradients: list[GradShard], network: Network, most: float) -> Tensor:
    """Scale all gradients so that their norm is at most `most`; return the norm before."""
    before = norm_of(gradients, network)
    _divide(gradients, _over(before, most))
    return before


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """As torch's function, for a parallelized or pipelined model: includes the gradients of stages on other ranks.

    All ranks call it. Returns the norm before clipping.
    """
    network = handle_of(model).network
    holders: Holders | None = getattr(getattr(model, "plan", None), "holders", None)
    return clip(pieces(model.named_parameters(), network, holders=holders), network, max_norm)


def set_clip_and_skip(
    optimizer: Optimizer, gradients: list[GradShard], size: Tensor, most: float, limit: float
) -> bool:
    """Make the next step of a fused optimizer a no-op if the gradients' norm `size` is above `limit` or NaN; otherwise
    make it first scale them to a norm of at most `most`, unless `most` is 0.

    Returns whether to call `step`. Of an optimizer that is not fused the host decides it, and waits for the norm.
    """
    if not optimizer.defaults.get("fused"):
        if most:
            _divide(gradients, _over(size, most))
        return bool(size <= limit)
    optimizer.found_inf = (~(size <= limit)).float()  # type: ignore[attr-defined]  # 1 forbids
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    if most == 0:
        return True
    if any(piece.gradient.dtype is torch.float64 for piece in gradients):
        _divide(gradients, _over(size, most))
    else:
        # In the optimizer's own kernel. It takes a float32 scale, which is not precise enough for float64.
        optimizer.grad_scale = _over(size, most).float()  # type: ignore[attr-defined]
    return True


def _over(size: Tensor, most: float) -> Tensor:
    """The number that gradients are divided by."""
    return (size / most).clamp(min=1)


def _divide(gradients: list[GradShard], by: Tensor) -> None:
    for piece in gradients:
        # torch would first round a zero-dimensional device tensor to the gradient's dtype; a one-dimensional one it
        # does not.
        gradient = piece.gradient[None]
        torch.div(gradient, by[None], out=gradient)
