"""The tensors of a checkpoint, whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cubeloom.train.checkpoint import checkpoints, read_blocks, read_index
from cubeloom.train.checkpoint.shard import Shard


def tensors(folder: Path) -> dict[str, Tensor]:
    """All of the newest checkpoint, whole."""
    checkpoint = checkpoints(folder)[-1]
    index = read_index(checkpoint)
    found = {name: torch.empty(stored.shape, dtype=stored.dtype) for name, stored in index.items()}
    read_blocks(
        checkpoint,
        index,
        {name: Shard.of(each, tuple(each.shape), (0,) * each.dim()) for name, each in found.items()},
    )
    return found
