"""Reads and writes the tensors of a checkpoint one at a time, in this process alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.errors import UserError, first_line
from cubeloom.models import Config, build
from cubeloom.models.description import config_from
from cubeloom.tools.convert.safetensors_files import split
from cubeloom.train.checkpoint import MASTER, STATE, WEIGHTS, check_files, index_of, read_blocks, read_manifest
from cubeloom.train.checkpoint.index import StoredBlock, StoredTensor, write_index
from cubeloom.train.checkpoint.manifest import MANIFEST
from cubeloom.train.checkpoint.shard import Shard
from cubeloom.train.checkpoint.tensor_file import TensorFile

_FILE_SIZE = 1 << 30  # so that each rank of a training gets some files to check


def write_weights(folder: Path, weights: Mapping[str, Tensor], values: Callable[[str], Tensor]) -> int:
    """`weights` are on the meta device; `values` is called once for each, when it is written. Returns the number of
    files.
    """
    index = {}
    shards = split({f"{WEIGHTS}{name}": tensor for name, tensor in weights.items()}, _FILE_SIZE)
    for number, shard in enumerate(shards):
        file = TensorFile(folder / f"weights-{number:05d}.safetensors", shard)
        for name, tensor in shard.items():
            file.write(name, values(name.removeprefix(WEIGHTS)))
            whole = StoredBlock(file.file.name, (0,) * tensor.dim(), tuple(tensor.shape))
            index[name] = StoredTensor(tensor.dtype, tuple(tensor.shape), (whole,))
        file.finish()
    write_index(folder, index)
    return len(shards)


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def config_of(checkpoint: Path, progress: Mapping[str, Any]) -> Config:
    """The model configuration that a checkpoint describes."""
    description = progress.get("model")
    if not isinstance(description, dict):
        raise UserError(f'the checkpoint {checkpoint} does not say of which model it is: its manifest has no "model"')
    try:
        config = config_from(description)
    except UserError as error:
        raise UserError(f"the checkpoint {checkpoint} is of a model that is not known here: {error}") from None
    try:
        with torch.device("meta"):
            build(config)
    except Exception as error:  # torch may refuse such sizes in any way
        said = first_line(error)
        raise UserError(f"the checkpoint {checkpoint} is of a model that cannot be built: {said}") from None
    return config


class CheckpointWeights:
    """`tensors`: the weights, on the meta device; `progress`: the manifest's progress."""

    def __init__(self, checkpoint: Path) -> None:
        manifest = read_manifest(checkpoint)
        check_files(checkpoint, manifest)
        self.progress = dict(manifest["progress"])
        self._checkpoint = checkpoint
        self._index = index_of(checkpoint, manifest)
        self.tensors = {
            name.removeprefix(WEIGHTS): torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            for name, stored in self._index.items()
            if name.startswith(WEIGHTS)
        }

    @property
    def family(self) -> str | None:
        """The family of its model, as the checkpoint says."""
        description = self.progress.get("model")
        return description.get("family") if isinstance(description, dict) else None

    def has(self, name: str) -> bool:
        return name in self.tensors

    def block(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        return self.read(name)[slices]

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, from all files with blocks of it.

        If `dtype` is wider than the weights' dtype, this is the optimizer's float32 master weight, if there is one.
        """
        entry, master = f"{WEIGHTS}{name}", f"{STATE}{MASTER}/{name}"
        if dtype is not None and dtype.itemsize > self.tensors[name].itemsize and master in self._index:
            entry = master
        stored = self._index[entry]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        read_blocks(self._checkpoint, self._index, {entry: Shard.of(tensor, stored.shape, (0,) * len(stored.shape))})
        return tensor
