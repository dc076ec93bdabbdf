"""Safetensors files that are written a tensor at a time, in any order.

A file is the length of its header, the header, which says where each tensor lies, and the tensors. All of that is known
before the first value is; safetensors' own writer wants all values at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cubeloom.convert.dtypes import CODES
from cubeloom.convert.hugging_face_folder import INDEX, SINGLE


class SafetensorsFiles:
    """One file if all fits in `shard_size` bytes, else several and an index, as transformers reads them.

    `tensors` are on the meta device. Each must be written once.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], shard_size: int) -> None:
        shards = split(tensors, shard_size)
        self.files = [folder / name for name in _names(len(shards))]
        self._places: dict[str, tuple[Path, int]] = {}
        for file, shard in zip(self.files, shards, strict=True):
            header, offsets = _header(shard)
            file.write_bytes(header)
            self._places |= {name: (file, len(header) + offset) for name, offset in offsets.items()}
        if len(shards) > 1:
            (folder / INDEX).write_text(json.dumps(self._index(tensors), indent=2, sort_keys=True) + "\n")

    def write(self, name: str, tensor: Tensor) -> None:
        file, place = self._places[name]
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(tensor.contiguous().view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """See to it that all is on the disk."""
        for file in self.files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())

    def _index(self, tensors: Mapping[str, Tensor]) -> dict[str, object]:
        sizes = {
            "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        }
        return {"metadata": sizes, "weight_map": {name: file.name for name, (file, _) in self._places.items()}}


def split(tensors: Mapping[str, Tensor], shard_size: int) -> list[dict[str, Tensor]]:
    """In order; a tensor that is larger than a shard may be has one of its own."""
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


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """With the length before it; and where each tensor begins after it. In safetensors' own order, wide numbers first."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda each: (-each[1].itemsize, CODES[each[1].dtype], each[0])):
        offsets[name], end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text, offsets
