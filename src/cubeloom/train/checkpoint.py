"""Checkpoints that any grid, schedule and number of ranks can go on from: weights, optimizer, and where training stood.

    folder/step-00000100/      one checkpoint: torch.distributed.checkpoint's files, and a manifest with their checksums
    folder/.step-00000200/     one that is being written; a crash leaves it, and it is never read

A checkpoint appears whole or not at all: it is written beside its place and renamed when all ranks are done.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cubeloom.comm import Aside, Network
from cubeloom.cube.parameter import block_of, local_of
from cubeloom.errors import UserError
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.part import Part
from cubeloom.train.shard import Shard
from cubeloom.train.sharded_optimizer import ShardedOptimizer

FORMAT = 1
WEIGHTS = "weights/"
"""Before the names of weights."""
_STATE = "optimizer/"
_MASTER = "master"  # float32 weights of an optimizer whose model has fewer digits
_MANIFEST = "manifest.json"
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
    shards = _weights(parameters, network) | _state(parameters, optimizer, network)
    return _write(folder, step, shards, network, progress, _updates(optimizer), keep)


class CheckpointWriter:
    """Checkpoints written by a thread while training goes on, one at a time. All ranks call the same."""

    def __init__(self, folder: Path, network: Network, keep: int) -> None:
        self._folder = folder
        self._network = network
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._aside = network.aside  # made here, by all ranks together

    def save(self, step: int, parameters: Parameters, optimizer: Optimizer, progress: Mapping[str, Any]) -> None:
        """Copy everything now, and write it later."""
        self.wait()
        shards = _weights(parameters, self._network) | _state(parameters, optimizer, self._network)
        copies = {
            name: Shard.of(shard.local.to("cpu", copy=True), shard.whole, shard.offset)
            for name, shard in shards.items()
        }
        arguments = self._folder, step, copies, self._network, progress, _updates(optimizer), self._keep
        self._thread = threading.Thread(target=self._work, args=arguments, name="cubeloom checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the last one is in its place; raises what kept it from there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _work(self, *arguments: Any) -> None:
        try:
            _write(*arguments)
        except BaseException as error:  # it is the training thread's to raise
            self._failure = error


def _write(
    folder: Path,
    step: int,
    shards: Mapping[str, Shard],
    network: Network,
    progress: Mapping[str, Any],
    updates: float,
    keep: int,
) -> Path:
    final = folder / f"step-{step:08d}"
    writing = folder / f".{final.name}"
    aside = network.aside
    _together(aside, network.rank == 0, lambda: _make_folder(writing), final)
    try:
        save(dict(shards), storage_writer=FileSystemWriter(writing, sync_files=True), process_group=aside.group)
    except CheckpointException as error:
        raise _cannot(final, next(iter(error.failures.values()))[0]) from error
    # Each rank reads its own files back, so that none reads them all.
    checksums = aside.gather({file.name: _checksum(file) for file in writing.glob(f"__{network.rank}_*")})

    def finish() -> None:
        seal(writing, step, progress, updates, {name: each for mine in checksums for name, each in mine.items()})
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)

    _together(aside, network.rank == 0, finish, final)
    return final


def _together(aside: Aside, mine: bool, work: Callable[[], None], final: Path) -> None:
    """One rank works; all wait for it, and fail with it."""
    failure: Exception | None = None
    if mine:
        try:
            work()
        except OSError as error:
            failure = error
    failures = [each for each in aside.gather(failure) if each is not None]
    if failures:
        raise _cannot(final, failures[0])


def _cannot(final: Path, error: BaseException) -> UserError:
    return UserError(f"the checkpoint {final} could not be written: {error}; those before it are whole")


def _make_folder(writing: Path) -> None:
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def seal(
    folder: Path,
    step: int,
    progress: Mapping[str, Any],
    updates: float = 0.0,
    checksums: Mapping[str, str] | None = None,
) -> None:
    """Make a folder whose files are all written a checkpoint: add what it says of itself, and their checksums."""
    known = checksums or {}
    manifest = {
        "format": FORMAT,
        "step": step,
        "updates": updates,
        "progress": dict(progress),
        "files": {file.name: known.get(file.name) or _checksum(file) for file in _files(folder)},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


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
    load({**weights, **_state(parameters, optimizer, network, stored)}, storage_reader=reader)
    _load_masters(reader, stored, parameters, optimizer, network)
    return int(manifest["step"]), dict(manifest["progress"])


def load_weights(checkpoint: Path, parameters: Parameters, optimizer: Optimizer, network: Network) -> None:
    """Fill the parameters alone, to begin a training with weights of another."""
    read_manifest(checkpoint)
    reader = FileSystemReader(checkpoint)
    stored = {
        name: each for name, each in reader.read_metadata().state_dict_metadata.items() if name.startswith(WEIGHTS)
    }
    weights = _weights(parameters, network)
    _check(checkpoint, weights, stored)
    load({**weights}, storage_reader=reader)
    _load_masters(reader, stored, parameters, optimizer, network)


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


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != _MANIFEST)


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def _weights(parameters: Parameters, network: Network) -> dict[str, Shard]:
    found = {}
    for name, parameter in parameters.items():
        block = block_of(parameter, network)
        found[f"{WEIGHTS}{name}"] = Shard.of(local_of(parameter), block.shape, block.offset)
    return found


def _state(
    parameters: Parameters, optimizer: Optimizer, network: Network, stored: Mapping[str, Any] | None = None
) -> dict[str, Shard]:
    """The optimizer's tensors, each a shard of one as large as its parameter; of those that are stored, if that is said."""
    found = {}
    for name, parameter in parameters.items():
        part = optimizer.parts[parameter]
        tensors = dict(optimizer.optimizer.state.get(part.tensor, {}))
        if part.master:
            tensors[_MASTER] = part.tensor
        for key, value in tensors.items():
            entry = f"{_STATE}{key}/{name}"
            if isinstance(value, torch.Tensor) and value.dim() and (stored is None or entry in stored):
                found[entry] = _shard(value, parameter, part, network)
    return found


def _shard(value: Tensor, parameter: nn.Parameter, part: Part, network: Network) -> Shard:
    block = block_of(parameter, network)
    return Shard.of(value, block.shape, (block.offset[0] + part.rows.start, *block.offset[1:]))


def _load_masters(
    reader: FileSystemReader, stored: Mapping[str, Any], parameters: Parameters, optimizer: Optimizer, network: Network
) -> None:
    """Between jobs of many digits and of few: nothing that is stored in many is rounded on its way to where it has many."""
    masters, blocks = {}, {}
    for name, parameter in parameters.items():
        part, entry = optimizer.parts[parameter], f"{_STATE}{_MASTER}/{name}"
        if part.master and entry not in stored:
            masters[f"{WEIGHTS}{name}"] = _shard(part.tensor, parameter, part, network)
        elif not part.master and entry in stored:
            block = block_of(parameter, network)
            blocks[entry] = Shard.of(local_of(parameter), block.shape, block.offset)
    # Also where a rank has none: loading is done by all together.
    load(masters, storage_reader=reader)
    load(blocks, storage_reader=reader)


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
        if name in parameters and key != _MASTER:
            tensor = optimizer.parts[parameters[name]].tensor
            state = optimizer.optimizer.state[tensor]
            state[key] = torch.empty_like(tensor)
            state["step"] = torch.tensor(updates)


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
