"""Writes a safetensors file one tensor at a time, in any order.

A file consists of the length of its header, the header with the position of each tensor, and the tensors. All positions
are known before the first value; safetensors' own writer needs all values at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the dtypes."""
CODES = {dtype: code for code, dtype in DTYPES.items()}


class TensorFile:
    """`tensors` have the shapes and dtypes, and may be on the meta device. Write each once, then call `finish`."""

    def __init__(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        self.file = file
        header, offsets = _header(tensors)
        file.write_bytes(header)
        self._places = {name: len(header) + offset for name, offset in offsets.items()}

    def write(self, name: str, tensor: Tensor) -> None:
        with self.file.open("r+b") as opened:
            opened.seek(self._places[name])
            # A tensor without dimensions cannot be viewed as bytes.
            opened.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Flush everything to disk."""
        with self.file.open("rb") as opened:
            os.fsync(opened.fileno())


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The header after its length, and the offset of each tensor. In safetensors' own order, widest dtypes first."""
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
