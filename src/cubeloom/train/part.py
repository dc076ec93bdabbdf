"""What this rank updates of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version


@dataclass(frozen=True)
class Part:
    """Some rows of this rank's block of a parameter, or all.

    `tensor` is what the optimizer updates. It shares memory with the rows of the block; or, where those are of few digits and
    `masters` are wanted, it is their float32 master, whose updates are not lost in rounding.
    """

    tensor: nn.Parameter
    rows: slice
    block: Tensor

    @classmethod
    def of(cls, block: Tensor, rows: slice, masters: bool = True) -> Part:
        own = block.detach()[rows]
        few_digits = own.dtype.itemsize < torch.float32.itemsize
        # nn.Parameter takes the same memory; `float` makes a copy of what has fewer digits, and only of that.
        return cls(nn.Parameter(own.float() if masters and few_digits else own), rows, own)

    @property
    def master(self) -> bool:
        return self.tensor.dtype != self.block.dtype

    def publish(self) -> None:
        """Give the block what the optimizer made."""
        if self.master:
            self.block.copy_(self.tensor.detach())
        else:
            # A fused optimizer does not count its change, and who gathered the old values asks for it.
            increment_version(self.tensor)
