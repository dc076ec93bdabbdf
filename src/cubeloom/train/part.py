"""The part of a parameter that this rank updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.comm import devices
from cubeloom.parallel.parameter import local_of


@dataclass(frozen=True)
class Part:
    """Some rows of this rank's block of a parameter, or all.

    The optimizer updates `tensor`. It shares memory with the rows of the block. If these have a low precision and
    `fp32_master_weights` are wanted, it is their float32 master copy, whose updates are not lost in rounding.
    """

    tensor: nn.Parameter
    rows: slice
    block: Tensor
    offload: bool = False
    """Its optimizer state and its master copy are in the host's memory (`train.offload`)."""
    home: Tensor | None = None
    """The master copy there. `tensor` then has values during its update only, and no memory otherwise."""

    @classmethod
    def of(cls, parameter: nn.Parameter, rows: slice, fp32_master_weights: bool = True, offload: bool = False) -> Part:
        own, home = local_of(parameter)[rows], None
        tensor = own
        if fp32_master_weights and own.dtype.itemsize < torch.float32.itemsize:
            if offload:
                home = devices.host_memory(own, torch.float32).copy_(own)
                tensor = torch.empty((), dtype=home.dtype, device=own.device).expand(own.shape)
            else:
                tensor = own.float()
        part = cls(nn.Parameter(tensor), rows, own, offload, home)  # nn.Parameter shares memory
        if part.master:
            parameter.grad_dtype = part.tensor.dtype  # so that a float32 sum is not rounded on its way to the master
        return part

    @property
    def master(self) -> bool:
        return self.tensor.dtype != self.block.dtype

    @property
    def values(self) -> Tensor:
        """What the optimizer updates; not during an update."""
        return self.tensor if self.home is None else self.home

    def new_state(self, dtype: torch.dtype) -> Tensor:
        """Zeros for an element-wise state of the optimizer, where that is kept."""
        if self.offload:
            return devices.host_memory(self.tensor, dtype).zero_()
        return torch.zeros_like(self.tensor, dtype=dtype)

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """Before a step: take the part's rows of the parameter's gradient, if there is one."""
        if local_of(parameter)[self.rows].data_ptr() != self.block.data_ptr():
            raise UserError(
                f"a parameter of shape {list(parameter.shape)} was moved or cast after its optimizer was made, which would "
                "go on updating the old memory; make the optimizer after model.to(...)"
            )
        if parameter.grad is not None:
            found = local_of(parameter.grad)[self.rows].to(self.tensor.dtype)
            self.tensor.grad = found if self.tensor.grad is None else self.tensor.grad.add_(found)

    def publish(self) -> None:
        """Copy the optimizer's result to the block."""
        if self.master:
            self.block.copy_(self.tensor.detach())
