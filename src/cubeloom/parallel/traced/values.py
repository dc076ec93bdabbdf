"""The initial values of a rank's blocks, if they are those of a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.replace import Fill

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def own_values(module: nn.Module) -> Fill:
    values = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))

    def fill(name: str, block: Block) -> Tensor:
        value = values[name].detach()
        if value.is_meta:
            raise UserError(
                f"{name} has no values: it is on the meta device; give `apply` a `fill`, or a module with values"
            )
        return value[block.slices]

    return fill


def refuse_different_values(module: nn.Module, network: Network) -> None:
    """Blocks of one parameter are taken from different ranks, and whole parameters must be equal on all ranks."""
    mine = {name: _bits(parameter) for name, parameter in module.named_parameters() if not parameter.is_meta}
    for rank, other in enumerate(network.host_group.gather(mine)):
        name = next((name for name in mine if other.get(name) != mine[name]), None)
        if name is not None:
            raise UserError(
                f"ranks have different values of {name}: rank {rank} differs from rank {network.rank}. Give all ranks the same"
                " seed before the model is built, or load the same weights on all"
            )


def _bits(tensor: Tensor) -> int:
    """A sum over the bits of a tensor, which is equal for equal tensors and almost never for others."""
    whole = _WHOLE_NUMBERS[tensor.element_size()]
    return int(tensor.detach().contiguous().view(whole).sum(dtype=torch.int64).item())


def place_buffers(module: nn.Module, network: Network, fill: Fill) -> None:
    for name, buffer in list(module.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        if buffer.is_meta:
            shape = tuple(buffer.shape)
            value = fill(name, Block(shape, (0,) * len(shape), shape))
        else:
            value = buffer
        torch_private.buffers_of(module.get_submodule(owner))[attribute] = value.to(network.device)
