"""Reads checkpoints: each rank reads its own blocks, whatever grid wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cubeloom.base.errors import UserError
from cubeloom.base.file_errors import retried
from cubeloom.comm import Network
from cubeloom.parallel.arranged import lie_of
from cubeloom.parallel.parameter import local_of
from cubeloom.train.adamw import AdamW
from cubeloom.train.checkpoint.blocks import read_blocks
from cubeloom.train.checkpoint.entries import (
    MASTER,
    STATE,
    WEIGHTS,
    Optimizer,
    Parameters,
    name_of,
    shard_of,
    state_of,
    updated,
    weights_of,
)
from cubeloom.train.checkpoint.index import INDEX, Index, index_of
from cubeloom.train.checkpoint.manifest import check_files, read_manifest, wait_until_seen
from cubeloom.train.checkpoint.shard import Shard

Shapes = Mapping[str, Sequence[int]]


class OtherModel(UserError):
    """A checkpoint whose tensors are not those of the model."""


def check_fits(checkpoint: Path, shapes: Shapes, optimizer: str | None = None) -> None:
    """Check that a training with parameters of these shapes can start from it, or resume with this optimizer."""
    manifest = read_manifest(checkpoint)
    if optimizer is not None:
        _check_optimizer(checkpoint, manifest, optimizer)
    check_files(checkpoint, manifest, [INDEX])
    _check_shapes(checkpoint, shapes, index_of(checkpoint, manifest))


def load_checkpoint(
    checkpoint: Path, parameters: Parameters, optimizer: Optimizer, network: Network
) -> tuple[int, dict[str, Any]]:
    """Load parameters and optimizer from a checkpoint of any grid; return the completed steps, and the progress."""
    manifest = _read_together(checkpoint, network)
    _check_optimizer(checkpoint, manifest, name_of(optimizer))
    stored = index_of(checkpoint, manifest)
    _check_shapes(checkpoint, _shapes(weights_of(parameters, network)), stored)
    _make_room(parameters, optimizer, stored, float(manifest["updates"]))
    _read(checkpoint, stored, parameters, optimizer, network)
    return int(manifest["step"]), dict(manifest["progress"])


def load_weights(checkpoint: Path, parameters: Parameters, optimizer: Optimizer | None, network: Network) -> None:
    """Load only the parameters and their master weights, to start a training from them or to evaluate them."""
    manifest = _read_together(checkpoint, network)
    kept = (WEIGHTS, f"{STATE}{MASTER}/")
    stored = {name: each for name, each in index_of(checkpoint, manifest).items() if name.startswith(kept)}
    _check_shapes(checkpoint, _shapes(weights_of(parameters, network)), stored)
    _read(checkpoint, stored, parameters, optimizer, network)


def _read_together(checkpoint: Path, network: Network) -> dict[str, Any]:
    """The manifest, after each rank has verified its share of the files, so that no rank reads them all."""

    def read() -> dict[str, Any]:
        if network.rank:
            wait_until_seen(checkpoint, "rank 0 chose")
        manifest = read_manifest(checkpoint)
        check_files(checkpoint, manifest, sorted(manifest["files"])[network.rank :: network.grid.world])
        return manifest

    return network.host_group.agree(read)


def _read(
    checkpoint: Path, stored: Index, parameters: Parameters, optimizer: Optimizer | None, network: Network
) -> None:
    """Each rank's shards. If one cannot be read, all ranks are refused."""
    wanted, exact = weights_of(parameters, network), {}
    if optimizer is not None:
        wanted |= state_of(parameters, optimizer, network, stored)
        exact = _exact(stored, parameters, optimizer, network)

    def read() -> None:
        for shards in (wanted, exact):
            retried(f"{checkpoint} cannot be read", partial(read_blocks, checkpoint, stored, shards))

    network.host_group.agree(read)


def _exact(stored: Index, parameters: Parameters, optimizer: Optimizer, network: Network) -> dict[str, Shard]:
    """Restores float32 master weights across a change of dtype, without rounding."""
    found = {}
    for name, parameter in updated(parameters, optimizer).items():
        part, entry = optimizer.parts[parameter], f"{STATE}{MASTER}/{name}"
        if part.master and entry not in stored:
            found[f"{WEIGHTS}{name}"] = shard_of(part.values, parameter, part, network)
        elif not part.master and entry in stored:
            found[entry] = Shard.lying(local_of(parameter), lie_of(parameter, network))
    return found


def _make_room(parameters: Parameters, optimizer: Optimizer, stored: Index, updates: float) -> None:
    """Create state tensors that the checkpoint has: an optimizer creates its own only in its first step."""
    own = updated(parameters, optimizer)
    for entry in stored:
        if not entry.startswith(STATE):
            continue
        key, _, name = entry.removeprefix(STATE).partition("/")
        if name in own and key != MASTER:
            part = optimizer.parts[own[name]]
            tensor, state = part.tensor, optimizer.optimizer.state[part.tensor]
            dtype = optimizer.optimizer.moments if isinstance(optimizer.optimizer, AdamW) else tensor.dtype
            state[key] = part.new_state(dtype)  # padding stays zero, because nothing is read into it
            state["step"] = torch.tensor(updates, device=tensor.device)  # where a fused optimizer counts its updates


def _check_optimizer(checkpoint: Path, manifest: Mapping[str, Any], here: str) -> None:
    """The state of one optimizer is useless to another. Imports and checkpoints of earlier versions name none."""
    stored = manifest.get("optimizer")
    if stored is not None and stored != here:
        raise UserError(
            f"the checkpoint {checkpoint} has the state of {stored}, and the optimizer here is {here}; go on with {stored}, "
            "or begin a new run with its weights alone (model.start)"
        )


def _shapes(weights: Mapping[str, Shard]) -> Shapes:
    return {name.removeprefix(WEIGHTS): shard.whole for name, shard in weights.items()}


def _check_shapes(checkpoint: Path, shapes: Shapes, stored: Index) -> None:
    for name, shape in shapes.items():
        entry = stored.get(f"{WEIGHTS}{name}")
        if entry is None:
            raise OtherModel(f"the checkpoint {checkpoint} is of another model: it has no {name}")
        if entry.shape != tuple(shape):
            raise OtherModel(
                f"the checkpoint {checkpoint} is of another model: {name} is {list(entry.shape)}, and here {list(shape)}"
            )
