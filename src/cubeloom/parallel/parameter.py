"""Parameters sharded over the cube: DTensors of which each rank only ever holds its own block."""

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
from cubeloom.parallel.arranged_tensor import ArrangedTensor
from cubeloom.parallel.arrangement import Arrangement


@dataclass(frozen=True)
class Block:
    """One rank's block of a tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]

    @classmethod
    def of(cls, network: Network, shape: tuple[int, ...], cuts: Mapping[str, int]) -> Block:
        """`cuts`: the dimension that each axis cuts: x and y first, z within their parts, data within z's."""
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
        """Initial values, which depend only on the key and the index in the whole tensor."""
        if isinstance(initial, Constant):
            return torch.full(self.local, initial.value, dtype=dtype, device=device)
        return (initial.std * counter.normal(key, self.shape, self.offset, self.local, device)).to(dtype)


def distribute(
    network: Network,
    local: Tensor,
    shape: tuple[int, ...],
    cuts: Mapping[str, int],
    arrangement: Arrangement | None = None,
) -> nn.Parameter:
    _watch_optimizers()
    placements: list[Placement] = [Shard(cuts[axis]) if axis in cuts else Replicate() for axis in CUBE]
    whole = torch.empty(shape, device="meta")
    # A block of a stored tensor may be non-contiguous, and a fused optimizer would then update the wrong elements.
    local = local.contiguous()
    if local.untyped_storage().nbytes() > local.numel() * local.element_size():
        local = (
            local.clone()
        )  # a view would keep the whole tensor in memory, and `deepcopy` fails on a view with an offset
    held = DTensor.from_local(
        local, network.cube_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(held if arrangement is None else ArrangedTensor.of(held, arrangement))


def block_of(tensor: Tensor, network: Network) -> Block:
    """The block of a parameter, or of a tensor distributed like one, that this rank holds."""
    assert isinstance(tensor, DTensor)
    axes = tensor.device_mesh.mesh_dim_names or ()
    cuts = {axis: place.dim for axis, place in zip(axes, tensor.placements, strict=True) if isinstance(place, Shard)}
    return Block.of(network, tuple(tensor.shape), cuts)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's block of a parameter or gradient, outside of autograd.

    `to_local` would create a node and check the mesh, 20 us per call; this attribute is the tensor that it wraps.
    """
    assert isinstance(tensor, DTensor)
    return torch_private.local_tensor(tensor).detach()


def exchange(parameter: nn.Parameter, block: Tensor) -> Tensor:
    """Replace this rank's block without autograd noticing; return the previous one."""
    assert isinstance(parameter, DTensor)
    local = torch_private.local_tensor(parameter)
    before = local.data
    local.data = block
    return before


def like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """The gradient of a parameter from its local block: distributed as the parameter, in the dtype of its gradients.

    `from_local` would create a node and repeat the parameter's checks, 90 us for each parameter in each step.
    """
    assert isinstance(parameter, DTensor)
    found = torch_private.distributed_like(local.to(parameter.grad_dtype or local.dtype), parameter)
    return ArrangedTensor.of(found, parameter.arrangement) if isinstance(parameter, ArrangedTensor) else found


# The change counters of a parameter's DTensor and of its block, and the block's address.
Version = tuple[int, int, int]


def version_of(parameter: nn.Parameter) -> Version:
    """Changes at every update by a torch optimizer, `load_state_dict`, or an assignment under `no_grad`."""
    assert isinstance(parameter, DTensor)
    local = torch_private.local_tensor(parameter)
    return torch_private.version(parameter), torch_private.version(local), local.data_ptr()


def check_unchanged(parameter: nn.Parameter, at_forward: Version, name: str) -> None:
    """Raise, as torch does, if a parameter that a backward needs has changed since the forward."""
    now = version_of(parameter)
    if now != at_forward:
        raise RuntimeError(
            f"{name} was changed between a forward and its backward, which needs the value that the forward used "
            f"(version {at_forward[:2]} then, {now[:2]} now); call backward before optimizer.step"
        )


@cache
def _watch_optimizers() -> None:
    """Make steps of torch's optimizers count as changes: foreach and fused ones on DTensors do not by themselves."""
    register_optimizer_step_post_hook(_count_updates)


def _count_updates(optimizer: Optimizer, *_: Any) -> None:
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    increment_version([torch_private.local_tensor(each) if isinstance(each, DTensor) else each for each in updated])


def own_part(axis: Axis) -> Callable[[Tensor], Tensor]:
    """This rank's rows of rows that all ranks of an axis have."""

    def part(rows: Tensor) -> Tensor:
        size = rows.shape[0] // axis.size
        return rows.narrow(0, axis.index * size, size)

    return part
