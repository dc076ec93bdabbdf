"""Parameters cut over the cube: DTensors of which each rank holds, and ever had, only its own block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from cubeloom.base import counter, torch_private
from cubeloom.base.initial import Constant, Initial
from cubeloom.comm import Axis, Network
from cubeloom.comm.network import CUBE, MESH_AXES


@dataclass(frozen=True)
class Block:
    """One rank's block of a tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]

    @classmethod
    def of(cls, network: Network, shape: tuple[int, ...], cuts: Mapping[str, int]) -> Block:
        """`cuts` says which dimension each axis cuts: x and y first, z within what they leave, data within that."""
        offset, local = [0] * len(shape), list(shape)
        for axis in MESH_AXES:
            if axis in cuts:
                dim = cuts[axis]
                local[dim] //= network.grid.size(axis)
                offset[dim] += local[dim] * network.coordinates[axis]
        return cls(shape, tuple(offset), tuple(local))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.local, strict=True))

    def draw(self, initial: Initial, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Initial values, which depend on the key and the place in the whole tensor alone."""
        if isinstance(initial, Constant):
            return torch.full(self.local, initial.value, dtype=dtype, device=device)
        return (initial.std * counter.normal(key, self.shape, self.offset, self.local, device)).to(dtype)


def distribute(network: Network, local: Tensor, shape: tuple[int, ...], cuts: Mapping[str, int]) -> nn.Parameter:
    _watch_optimizers()
    placements: list[Placement] = [Shard(cuts[axis]) if axis in cuts else Replicate() for axis in CUBE]
    whole = torch.empty(shape, device="meta")
    # A block cut out of a stored tensor may lie scattered in memory, where a fused optimizer would update the wrong numbers.
    local = local.contiguous()
    if local.untyped_storage().nbytes() > local.numel() * local.element_size():
        local = (
            local.clone()
        )  # a view would keep the whole tensor in memory, and `deepcopy` fails on one with an offset
    return nn.Parameter(
        DTensor.from_local(
            local, network.cube_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    )


def block_of(tensor: Tensor, network: Network) -> Block:
    """Which block of a parameter, or of what is distributed like one, this rank holds."""
    assert isinstance(tensor, DTensor)
    axes = tensor.device_mesh.mesh_dim_names or ()
    cuts = {axis: place.dim for axis, place in zip(axes, tensor.placements, strict=True) if isinstance(place, Shard)}
    return Block.of(network, tuple(tensor.shape), cuts)


def local_of(tensor: Tensor) -> Tensor:
    """The block that this rank holds of a parameter or a gradient, outside autograd.

    `to_local` would make a node and check the mesh, 20 us each time; the attribute is what it wraps.
    """
    assert isinstance(tensor, DTensor)
    return torch_private.local_tensor(tensor).detach()


def exchange(parameter: nn.Parameter, block: Tensor) -> Tensor:
    """Put another block in the place of this rank's, behind autograd's back; gives the one that was there."""
    assert isinstance(parameter, DTensor)
    local = torch_private.local_tensor(parameter)
    before = local.data
    local.data = block
    return before


def like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """A local block as a tensor distributed as the parameter is, in the dtype of its gradients: its gradient.

    `from_local` would make a node and check anew what holds for the parameter, 90 us each time, for each of them in each step.
    """
    assert isinstance(parameter, DTensor)
    return torch_private.distributed_like(local.to(parameter.grad_dtype or local.dtype), parameter)


# How often a parameter was changed, as its DTensor and its block count it, and where the block lies.
Version = tuple[int, int, int]


def version_of(parameter: nn.Parameter) -> Version:
    """Changes with every update by a torch optimizer, `load_state_dict`, or an assignment under `no_grad`."""
    assert isinstance(parameter, DTensor)
    local = torch_private.local_tensor(parameter)
    return torch_private.version(parameter), torch_private.version(local), local.data_ptr()


def check_unchanged(parameter: nn.Parameter, at_forward: Version, name: str) -> None:
    """Raise, as torch does, if a parameter that a backward needs is not what it was in the forward."""
    now = version_of(parameter)
    if now != at_forward:
        raise RuntimeError(
            f"{name} was changed between a forward and its backward, which needs the value that the forward used "
            f"(version {at_forward[:2]} then, {now[:2]} now); call backward before optimizer.step"
        )


@cache
def _watch_optimizers() -> None:
    """Let the steps of torch's optimizers count as changes: foreach and fused ones on DTensors do not, by themselves."""
    register_optimizer_step_post_hook(_count_updates)


def _count_updates(optimizer: Optimizer, *_: Any) -> None:
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    increment_version([torch_private.local_tensor(each) if isinstance(each, DTensor) else each for each in updated])


def own_part(axis: Axis) -> Callable[[Tensor], Tensor]:
    """Of rows that all ranks of an axis have, those that are this rank's."""

    def part(rows: Tensor) -> Tensor:
        size = rows.shape[0] // axis.size
        return rows.narrow(0, axis.index * size, size)

    return part
