"""Checkpoints that any grid, schedule and number of ranks can go on from: weights, optimizer, and where training stood.

    folder/step-00000100/      one checkpoint: torch.distributed.checkpoint's files, and a manifest with their checksums
    folder/.step-00000200/     one that is being written; a crash leaves it, and it is never read

A checkpoint appears whole or not at all: it is written beside its place and renamed when all ranks are done.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cubeloom.comm import Network
from cubeloom.cube.parameter import block_of, local_of
from cubeloom.errors import UserError
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.shard import Shard
from cubeloom.train.sharded_optimizer import ShardedOptimizer

FORMAT = 1
_MANIFEST = "manifest.json"
_WEIGHTS, _STATE = "weights/", "optimizer/"
Parameters = Mapping[str, nn.Parameter]
Optimizer = BlockOptimizer | ShardedOptimizer


def save_checkpoint(
    folder: Path,
    step: int,
    parameters: Parameters,
    optimizer: Optimizer,
    network: Network,
    progress: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write all that is needed to go on after `step` steps; called by all ranks. The newest `keep` are kept.

    `progress` is what is not a tensor, such as the position in the data: JSON, the same on all ranks.
    """
    final = folder / f"step-{step:08d}"
    writing = folder / f".{final.name}"
    if network.rank == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    network.barrier()
    save(_weights(parameters, network) | _state(parameters, optimizer, network), storage_writer=_writer(writing))
    if network.rank == 0:
        manifest = {
            "format": FORMAT,
            "step": step,
            "updates": _updates(optimizer),
            "progress": dict(progress),
            "files": {file.name: _checksum(file) for file in _files(writing)},
        }
        (writing / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    network.barrier()
    return final


def load_checkpoint(
    checkpoint: Path, parameters: Parameters, optimizer: Optimizer, network: Network
) -> tuple[int, dict[str, Any]]:
    """Fill parameters and optimizer from a checkpoint of any grid; gives the number of steps done, and the progress."""
    manifest = read_manifest(checkpoint)
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    weights = _weights(parameters, network)
    _check(checkpoint, weights, stored)
    _make_room(parameters, optimizer, stored, float(manifest["updates"]))
    load({**weights, **_state(parameters, optimizer, network)}, storage_reader=reader)
    return int(manifest["step"]), dict(manifest["progress"])


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / _MANIFEST).exists())


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, once its files are what they were when it was written."""
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / _MANIFEST).read_text())
    except FileNotFoundError:
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it has no {_MANIFEST}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"the checkpoint {checkpoint} is damaged: {_MANIFEST}: {error}") from None
    if manifest.get("format") != FORMAT:
        raise UserError(f"{checkpoint} has format {manifest.get('format')}, and this version reads {FORMAT}")
    for name, checksum in manifest["files"].items():
        file = checkpoint / name
        if not file.exists():
            raise UserError(f"the checkpoint {checkpoint} is damaged: {name} is missing")
        if _checksum(file) != checksum:
            raise UserError(f"the checkpoint {checkpoint} is damaged: {name} is not what was written")
    return manifest


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, sync_files=True)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != _MANIFEST)


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def _weights(parameters: Parameters, network: Network) -> dict[str, Shard]:
    found = {}
    for name, parameter in parameters.items():
        block = block_of(parameter, network)
        found[f"{_WEIGHTS}{name}"] = Shard.of(local_of(parameter), block.shape, block.offset)
    return found


def _state(parameters: Parameters, optimizer: Optimizer, network: Network) -> dict[str, Shard]:
    """The optimizer's tensors, each a shard of one as large as its parameter."""
    found = {}
    for name, parameter in parameters.items():
        part = optimizer.parts[parameter]
        block = block_of(parameter, network)
        offset = (block.offset[0] + part.rows.start, *block.offset[1:])
        for key, value in optimizer.optimizer.state.get(part.tensor, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                found[f"{_STATE}{key}/{name}"] = Shard.of(value, block.shape, offset)
    return found


def _updates(optimizer: Optimizer) -> float:
    """How many updates the optimizer has made, the same for every parameter; 0 if it does not count."""
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            return float(state["step"])
    return 0.0


def _make_room(parameters: Parameters, optimizer: Optimizer, stored: Mapping[str, Any], updates: float) -> None:
    """State tensors where the checkpoint has some: an optimizer makes its own at its first step only."""
    for entry in stored:
        if not entry.startswith(_STATE):
            continue
        key, _, name = entry.removeprefix(_STATE).partition("/")
        if name in parameters:
            tensor = optimizer.parts[parameters[name]].tensor
            state = optimizer.optimizer.state[tensor]
            state[key] = torch.empty_like(tensor)
            state["step"] = torch.tensor(updates)


def _check(checkpoint: Path, weights: Mapping[str, Shard], stored: Mapping[str, Any]) -> None:
    for name, shard in weights.items():
        plain = name.removeprefix(_WEIGHTS)
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(f"the checkpoint {checkpoint} is of another model: it has no {plain}")
        if tuple(entry.size) != shard.whole:
            raise UserError(
                f"the checkpoint {checkpoint} is of another model: {plain} is {list(entry.size)}, and here {list(shard.whole)}"
            )
