"""Text that is on every machine with Python: the source of its standard library, a token for each byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from cubeloom.base import counter
from cubeloom.parallel import Batch


def standard_library() -> Tensor:
    """The top-level modules in alphabetical order, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw(text: Tensor, batch: Batch, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """`[samples, sequence]` tokens, and those that follow them; which passages depends on seed and step alone."""
    where = counter.uniform(counter.key(seed, "passages", step), torch.arange(batch.samples))
    starts = (where * (len(text) - batch.sequence - 1)).long().tolist()
    passages = torch.stack([text[start : start + batch.sequence + 1] for start in starts]).long()
    return passages[:, :-1], passages[:, 1:]
