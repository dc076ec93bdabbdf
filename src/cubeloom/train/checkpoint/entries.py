"""The tensors of a checkpoint: weights, and what an optimizer keeps, each a shard of a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.comm import Network
from cubeloom.cube.parameter import block_of, local_of
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.checkpoint.shard import Shard
from cubeloom.train.part import Part
from cubeloom.train.sharded_optimizer import ShardedOptimizer

WEIGHTS = "weights/"
"""Before the names of weights."""
STATE = "optimizer/"
MASTER = "master"
"""Float32 weights of an optimizer whose model has fewer digits."""
Parameters = Mapping[str, nn.Parameter]
Optimizer = BlockOptimizer | ShardedOptimizer


def weights_of(parameters: Parameters, network: Network) -> dict[str, Shard]:
    found = {}
    for name, parameter in parameters.items():
        block = block_of(parameter, network)
        found[f"{WEIGHTS}{name}"] = Shard.of(local_of(parameter), block.shape, block.offset)
    return found


def state_of(
    parameters: Parameters, optimizer: Optimizer, network: Network, stored: Mapping[str, Any] | None = None
) -> dict[str, Shard]:
    """The optimizer's tensors, each a shard of one as large as its parameter; of those that are stored, if that is said."""
    found = {}
    for name, parameter in parameters.items():
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
    block = block_of(parameter, network)
    return Shard.of(value, block.shape, (block.offset[0] + part.rows.start, *block.offset[1:]))


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
