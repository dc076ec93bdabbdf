"""`cubeloom.init`: this process becomes a rank of a grid, however it was started."""

from __future__ import annotations

import atexit
import difflib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cubeloom.base.errors import UserError, counted
from cubeloom.base.grid import AXES, Grid
from cubeloom.comm import Network, devices, world
from cubeloom.launch.environment import current, membership
from cubeloom.launch.ready import join


def init(*, device: devices.Kind | None = None, timeout: float = 600, **sizes: int) -> Network:
    """Join the ranks of this job into a grid: `init(data=2, z=2, y=2)`; axes that are not named have size 1.

    Works under torchrun, mpirun, srun and `cubeloom.launch.run`, and in a single process for a grid of one rank. `timeout`:
    seconds that a rank waits for another before the job ends.
    """
    for name in sizes:
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, 1, cutoff=0.0)[0]
            raise UserError(f"init has no axis {name!r}; did you mean {near!r}? The axes are {', '.join(AXES)}")
    grid = Grid(**cast("dict[str, Any]", sizes))
    kind = device or _default()
    if not devices.available(kind):
        raise UserError(f"device={kind!r}: torch sees none here; use device={devices.CPU!r}")
    if not dist.is_initialized():
        _join(grid, kind, timeout)
    return Network(grid, devices.current(kind), timeout)


def network_of(mesh: Network | DeviceMesh) -> Network:
    """The network of a mesh: of torch's with these axes' names, too, whose ranks are those of the job in order."""
    if isinstance(mesh, Network):
        return mesh
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(AXES):
        raise UserError(f"this DeviceMesh has dimensions {names or 'without names'}; they must be of {', '.join(AXES)}")
    if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise UserError("this DeviceMesh must have all ranks of the job, in order: use init_device_mesh")
    placement = (*names, *(axis for axis in AXES if axis not in names))
    grid = Grid(**dict(zip(names, mesh.mesh.shape, strict=True)), placement=placement)
    return Network(grid, devices.current("cuda" if mesh.device_type == "cuda" else devices.CPU))


def _default() -> devices.Kind:
    if dist.is_initialized():
        return "cuda" if dist.get_backend() == devices.BACKENDS["cuda"] else devices.CPU
    return "cuda" if torch.cuda.is_available() else devices.CPU


def _join(grid: Grid, kind: devices.Kind, timeout: float) -> None:
    here = membership(current())
    if here is not None:
        join(here, kind, timeout)
    elif grid.world == 1:
        devices.use(kind, 0)
        world.join(world.host(), "alone", 0, 1, kind, timeout)
    else:
        raise UserError(
            f"the grid {grid} needs {counted(grid.world, 'rank')}, and this is a single process: start it with"
            f" `torchrun --nproc-per-node {grid.world} FILE`, or call a function with"
            f" cubeloom.launch.run({grid.world}, function)"
        )
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
