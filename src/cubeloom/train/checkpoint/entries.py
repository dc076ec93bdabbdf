"""The tensors of a checkpoint: weights, and what an optimizer keeps, each a shard of a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.parallel.arranged import lie_of
from cubeloom.parallel.parameter import local_of
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.checkpoint.shard import Shard
from cubeloom.train.part import Part
from cubeloom.train.sharded_optimizer import ShardedOptimizer

WEIGHTS = "weights/"
"""Before the names of weights."""
STATE = "optimizer/"
MASTER = "master"
"""Float32 weights of an optimizer whose model has fewer digits."""
Parameters = nn.Module | Mapping[str, Tensor]
"""A model; or what is saved of it, by name: its parameters, and buffers that are part of its state."""
Optimizer = BlockOptimizer | ShardedOptimizer


def tensors_of(model: Parameters, network: Network) -> Mapping[str, Tensor]:
    """All that a checkpoint of this model has; or what was given of it, if nothing of its state is missing."""
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
    """Those that `state_dict` has."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def weights_of(parameters: Parameters, network: Network) -> dict[str, Shard]:
    """A buffer that is no distributed tensor is whole on every rank."""
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
    """Those that the optimizer updates."""
    named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters.items()
    return {name: each for name, each in named if isinstance(each, nn.Parameter) and each in optimizer.parts}


def state_of(
    parameters: Parameters, optimizer: Optimizer, network: Network, stored: Mapping[str, Any] | None = None
) -> dict[str, Shard]:
    """The optimizer's tensors, each a shard of one as large as its parameter; of those that are stored, if that is said."""
    found = {}
    for name, parameter in updated(parameters, optimizer).items():
        part = optimizer.parts[parameter]
        tensors = dict(optimizer.optimizer.state.get(part.tensor, {}))
        if part.master:
            tensors[MASTER] = part.tensor
        for key, value in tensors.items():
            entry = f"{STATE}{key}/{name}"
            if isinstance(value, torch.Tensor) and value.dim() and (stored is None or entry in stored):
                found[entry] = shard_of(value, parameter, part, network)
    return found


def shard_of(value: Tensor, parameter: nn.Parameter, part: Part, network: Network) -> Shard:
    own = (
        local_of(value) if isinstance(value, DTensor) else value
    )  # torch's optimizers keep state as the parameter lies
    return Shard.lying(own, lie_of(parameter, network, part.rows))


def said_of(optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint says of the optimizer whose tensors it has."""
    return {"optimizer": name_of(optimizer), "updates": _updates_of(optimizer)}


def name_of(optimizer: Optimizer) -> str:
    return type(optimizer.optimizer).__name__


def _updates_of(optimizer: Optimizer) -> float:
    """How many updates the optimizer has made, the same for every parameter; 0 if it does not count."""
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            return float(state["step"])
    return 0.0
