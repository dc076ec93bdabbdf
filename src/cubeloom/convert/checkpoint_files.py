"""The tensors of a checkpoint, read and written one at a time, in this process alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from cubeloom.errors import UserError
from cubeloom.train.checkpoint import MASTER, METADATA, STATE, WEIGHTS, check_files, read_manifest


class Deferred(Tensor):
    """The shape and dtype of a tensor, on the meta device; its values are asked for when they are written."""

    values: Callable[[], Tensor]

    @classmethod
    def of(cls, shape: Tensor, values: Callable[[], Tensor]) -> Deferred:
        deferred = shape.as_subclass(cls)
        deferred.values = values
        return deferred

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.values()


def write_weights(folder: Path, weights: Mapping[str, Deferred]) -> None:
    """What torch's `save` does, without the processes. A file a tensor: torch keeps what is in a file until it is whole."""
    planner = DefaultSavePlanner()
    writer = FileSystemWriter(folder, single_file_per_rank=False, sync_files=True)
    writer.set_up_storage_writer(True)
    planner.set_up_planner({f"{WEIGHTS}{name}": tensor for name, tensor in weights.items()}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])


def is_checkpoint(folder: Path) -> bool:
    """Of torch; whether it is ours its manifest says."""
    return (folder / METADATA).is_file()


class CheckpointWeights:
    """`tensors` are the weights, on the meta device; `progress` is what the checkpoint's manifest says."""

    def __init__(self, checkpoint: Path) -> None:
        manifest = read_manifest(checkpoint)
        check_files(checkpoint, manifest)
        self.progress = dict(manifest["progress"])
        self._reader = FileSystemReader(checkpoint)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self.tensors: dict[str, Tensor] = {}
        for name, entry in self._metadata.state_dict_metadata.items():
            if name.startswith(WEIGHTS):
                if not isinstance(entry, TensorStorageMetadata):
                    raise UserError(f"the checkpoint {checkpoint} is damaged: {name} is not a tensor")
                shape = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                self.tensors[name.removeprefix(WEIGHTS)] = shape

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, from whichever files have blocks of it.

        If `dtype` has room for more digits than the weights have, it is the optimizer's float32 weight, where there is one.
        """
        entry, master = f"{WEIGHTS}{name}", f"{STATE}{MASTER}/{name}"
        tensor = torch.empty_like(self.tensors[name], device="cpu")
        stored = self._metadata.state_dict_metadata.get(master)
        if dtype is not None and dtype.itemsize > tensor.itemsize and isinstance(stored, TensorStorageMetadata):
            entry, tensor = master, torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({entry: tensor}, self._metadata, True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor
