"""Reading checkpoints: each rank reads what it holds, whatever grid wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from cubeloom.comm import Network
from cubeloom.cube.parameter import block_of, local_of
from cubeloom.errors import UserError
from cubeloom.train.checkpoint.entries import (
    MASTER,
    STATE,
    WEIGHTS,
    Optimizer,
    Parameters,
    name_of,
    shard_of,
    state_of,
    weights_of,
)
from cubeloom.train.checkpoint.manifest import read_manifest
from cubeloom.train.checkpoint.shard import Shard


def load_checkpoint(
    checkpoint: Path, parameters: Parameters, optimizer: Optimizer, network: Network
) -> tuple[int, dict[str, Any]]:
    """Fill parameters and optimizer from a checkpoint of any grid; gives the number of steps done, and the progress."""
    manifest = read_manifest(checkpoint)
    _check_optimizer(checkpoint, manifest, optimizer)
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    weights = weights_of(parameters, network)
    _check(checkpoint, weights, stored)
    _make_room(parameters, optimizer, stored, float(manifest["updates"]))
    load({**weights, **state_of(parameters, optimizer, network, stored)}, storage_reader=reader)
    _load_masters(reader, stored, parameters, optimizer, network)
    return int(manifest["step"]), dict(manifest["progress"])


def load_weights(checkpoint: Path, parameters: Parameters, optimizer: Optimizer, network: Network) -> None:
    """Fill the parameters alone, and their masters, to begin a training with weights of another."""
    read_manifest(checkpoint)
    reader = FileSystemReader(checkpoint)
    found, wanted = reader.read_metadata().state_dict_metadata, (WEIGHTS, f"{STATE}{MASTER}/")
    stored = {name: each for name, each in found.items() if name.startswith(wanted)}
    weights = weights_of(parameters, network)
    _check(checkpoint, weights, stored)
    load({**weights, **state_of(parameters, optimizer, network, stored)}, storage_reader=reader)
    _load_masters(reader, stored, parameters, optimizer, network)


def _load_masters(
    reader: FileSystemReader, stored: Mapping[str, Any], parameters: Parameters, optimizer: Optimizer, network: Network
) -> None:
    """Between jobs of many digits and of few: nothing that is stored in many is rounded on its way to where it has many."""
    masters, blocks = {}, {}
    for name, parameter in parameters.items():
        part, entry = optimizer.parts[parameter], f"{STATE}{MASTER}/{name}"
        if part.master and entry not in stored:
            masters[f"{WEIGHTS}{name}"] = shard_of(part.tensor, parameter, part, network)
        elif not part.master and entry in stored:
            block = block_of(parameter, network)
            blocks[entry] = Shard.of(local_of(parameter), block.shape, block.offset)
    # Also where a rank has none: loading is done by all together.
    load(masters, storage_reader=reader)
    load(blocks, storage_reader=reader)


def _make_room(parameters: Parameters, optimizer: Optimizer, stored: Mapping[str, Any], updates: float) -> None:
    """State tensors where the checkpoint has some: an optimizer makes its own at its first step only."""
    for entry in stored:
        if not entry.startswith(STATE):
            continue
        key, _, name = entry.removeprefix(STATE).partition("/")
        if name in parameters and key != MASTER:
            tensor = optimizer.parts[parameters[name]].tensor
            state = optimizer.optimizer.state[tensor]
            state[key] = torch.empty_like(tensor)
            state["step"] = torch.tensor(updates, device=tensor.device)  # where a fused optimizer counts


def _check_optimizer(checkpoint: Path, manifest: Mapping[str, Any], optimizer: Optimizer) -> None:
    """What one optimizer keeps is of no use to another. Imports and checkpoints of earlier versions name none."""
    stored, here = manifest.get("optimizer"), name_of(optimizer)
    if stored is not None and stored != here:
        raise UserError(
            f"the checkpoint {checkpoint} has the state of {stored}, and the optimizer here is {here}; go on with {stored}, "
            "or begin a new run with its weights alone (model.start)"
        )


def _check(checkpoint: Path, weights: Mapping[str, Shard], stored: Mapping[str, Any]) -> None:
    for name, shard in weights.items():
        plain = name.removeprefix(WEIGHTS)
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(f"the checkpoint {checkpoint} is of another model: it has no {plain}")
        if tuple(entry.size) != shard.whole:
            raise UserError(
                f"the checkpoint {checkpoint} is of another model: {plain} is {list(entry.size)}, and here {list(shard.whole)}"
            )
