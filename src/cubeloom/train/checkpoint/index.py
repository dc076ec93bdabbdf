"""The index of a checkpoint: its tensors, and the file of each block. JSON, so that reading it executes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from cubeloom.base.errors import UserError
from cubeloom.base.files import is_plain_name, read_json, replace_text
from cubeloom.train.checkpoint.tensor_file import CODES, DTYPES

INDEX = "index.json"


@dataclass(frozen=True)
class StoredBlock:
    """A block from `offset` on, in `file` under the tensor's name; with a `number` if there are several in one file."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    number: int = 0

    def entry(self, name: str) -> str:
        return entry_of(name, self.number)


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]
    """Together they make the whole tensor, each element once."""


Index = Mapping[str, StoredTensor]


def entry_of(name: str, number: int) -> str:
    """The name in a file of one of several blocks of a tensor."""
    return f"{name}#{number}" if number else name


def files_of(index: Index) -> set[str]:
    """The files with its tensors: a checkpoint needs these and the index, and no others."""
    return {block.file for tensor in index.values() for block in tensor.blocks}


def write_index(folder: Path, index: Index) -> None:
    known = {
        name: {
            "dtype": CODES[tensor.dtype],
            "shape": tensor.shape,
            "blocks": [
                {"file": block.file, "offset": block.offset, "shape": block.shape}
                | ({"number": block.number} if block.number else {})
                for block in tensor.blocks
            ],
        }
        for name, tensor in index.items()
    }
    replace_text(folder / INDEX, json.dumps(known))


def read_index(folder: Path) -> Index:
    """Raises UserError if it is not an index. The manifest says whether it is the one that was written."""
    known = read_json(folder / INDEX)
    try:
        return {name: _tensor(entry) for name, entry in known.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder / INDEX} is damaged: it does not describe tensors ({what})") from None


def index_of(checkpoint: Path, manifest: Mapping[str, Any]) -> Index:
    """The index of a checkpoint to be read. All files that it names must be in the manifest, which has their checksums."""
    index = read_index(checkpoint)
    if unknown := files_of(index) - manifest["files"].keys():
        raise UserError(f"{checkpoint / INDEX} is damaged: it names {min(unknown)}, whose checksums are unknown")
    return index


def _tensor(entry: Mapping[str, Any]) -> StoredTensor:
    shape = _sizes(entry["shape"])
    blocks = tuple(_block(each, shape) for each in entry["blocks"])
    if sum(prod(block.shape) for block in blocks) != prod(shape):
        raise ValueError("blocks do not add up to their tensor")
    return StoredTensor(DTYPES[entry["dtype"]], shape, blocks)


def _block(entry: Mapping[str, Any], whole: tuple[int, ...]) -> StoredBlock:
    file, (number,) = entry["file"], _sizes([entry.get("number", 0)])
    block = StoredBlock(file, _sizes(entry["offset"]), _sizes(entry["shape"]), number)
    ends = (start + size for start, size in zip(block.offset, block.shape, strict=True))
    if not is_plain_name(block.file) or any(end > most for end, most in zip(ends, whole, strict=True)):
        raise ValueError("a block is outside of its tensor, or its file outside of the folder")
    return block


def _sizes(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(size) is int and size >= 0 for size in found):
        raise TypeError("a shape is a list of whole numbers")
    return tuple(found)
