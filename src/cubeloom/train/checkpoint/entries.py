"""The tensors of a checkpoint: weights and optimizer state, each a shard of a whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cubeloom.base.errors import UserError
from cubeloom.comm import Network, devices
from cubeloom.parallel.arranged import lie_of
from cubeloom.parallel.parameter import local_of
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.checkpoint.shard import Shard
from cubeloom.train.part import Part
from cubeloom.train.sharded_optimizer import ShardedOptimizer

WEIGHTS = "weights/"
"""Prefix of the names of weights."""
STATE = "optimizer/"
MASTER = "master"
"""Float32 master weights of an optimizer whose model has a lower precision."""
Parameters = nn.Module | Mapping[str, Tensor]
"""A model; or its saved tensors by name: its parameters, and buffers that are part of its state."""
Optimizer = BlockOptimizer | ShardedOptimizer


def tensors_of(model: Parameters, network: Network) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint of this model. If tensors are given, none of its state may be missing."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters()) | _kept_buffers(model)
    given = set(map(id, model.values()))
    for owner in network.models:
        if given.isdisjoint(map(id, owner.parameters())):
            continue
        missing = [name for name, buffer in _kept_buffers(owner).items() if id(buffer) not in given]
        if missing:
            raise UserError(
                f"a checkpoint of {type(owner).__name__} without its buffer {missing[0]}"
                + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
                + " would be of another model: give the model itself instead of its parameters"
            )
    return model


def _kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `state_dict` has."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def weights_of(parameters: Parameters, network: Network) -> dict[str, Shard]:
    """A buffer that is not a distributed tensor is whole on every rank."""
    found = {}
    for name, tensor in tensors_of(parameters, network).items():
        if isinstance(tensor, DTensor):
            shard = Shard.lying(local_of(tensor), lie_of(tensor, network))
        else:
            whole = tensor.view(-1) if tensor.dim() == 0 else tensor
            shard = Shard.of(whole, tuple(whole.shape), (0,) * whole.dim())
        found[f"{WEIGHTS}{name}"] = shard
    return found


def updated(parameters: Parameters, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates."""
    named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters.items()
    return {name: each for name, each in named if isinstance(each, nn.Parameter) and each in optimizer.parts}


def state_of(
    parameters: Parameters, optimizer: Optimizer, network: Network, stored: Mapping[str, Any] | None = None
) -> dict[str, Shard]:
    """The optimizer's tensors, each with the shape of its parameter; only the stored ones, if `stored` is given."""
    found = {}
    devices.settle(network.device)  # state in the host's memory may still be on its way there
    for name, parameter in updated(parameters, optimizer).items():
        part = optimizer.parts[parameter]
        tensors = dict(optimizer.optimizer.state.get(part.tensor, {}))
        if part.master:
            tensors[MASTER] = part.values
        for key, value in tensors.items():
            entry = f"{STATE}{key}/{name}"
            if isinstance(value, torch.Tensor) and value.dim() and (stored is None or entry in stored):
                found[entry] = shard_of(value, parameter, part, network)
    return found


def shard_of(value: Tensor, parameter: nn.Parameter, part: Part, network: Network) -> Shard:
    own = local_of(value) if isinstance(value, DTensor) else value  # torch's optimizers shard state like the parameter
    return Shard.lying(own, lie_of(parameter, network, part.rows))


def said_of(optimizer: Optimizer) -> dict[str, Any]:
    """A checkpoint's description of the optimizer whose tensors it has."""
    return {"optimizer": name_of(optimizer), "updates": _updates_of(optimizer)}


def name_of(optimizer: Optimizer) -> str:
    return type(optimizer.optimizer).__name__


def _updates_of(optimizer: Optimizer) -> float:
    """The optimizer's number of updates, equal for every parameter; 0 if it does not count them."""
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            return float(state["step"])
    return 0.0
