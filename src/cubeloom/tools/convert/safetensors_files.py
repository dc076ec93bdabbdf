"""Safetensors files of limited size, written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from cubeloom.tools.convert.hugging_face_folder import INDEX, SINGLE
from cubeloom.train.checkpoint.tensor_file import TensorFile


class SafetensorsFiles:
    """One file if everything fits in `shard_size` bytes, otherwise several and an index, as transformers reads them.

    `tensors` are on the meta device. Each must be written once.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], shard_size: int) -> None:
        shards = split(tensors, shard_size)
        self._opened = [
            TensorFile(folder / name, shard) for name, shard in zip(_names(len(shards)), shards, strict=True)
        ]
        self.files = [each.file for each in self._opened]
        self._places = {name: each for each, shard in zip(self._opened, shards, strict=True) for name in shard}
        if len(shards) > 1:
            (folder / INDEX).write_text(
                json.dumps(self._index(tensors), indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )

    def write(self, name: str, tensor: Tensor) -> None:
        self._places[name].write(name, tensor)

    def finish(self) -> None:
        """Flush everything to disk."""
        for each in self._opened:
            each.finish()

    def file_of(self, name: str) -> str:
        return self._places[name].file.name

    def _index(self, tensors: Mapping[str, Tensor]) -> dict[str, object]:
        sizes = {
            "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        }
        return {"metadata": sizes, "weight_map": {name: self.file_of(name) for name in self._places}}


def split(tensors: Mapping[str, Tensor], shard_size: int) -> list[dict[str, Tensor]]:
    """In order. A tensor larger than a shard gets its own."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
