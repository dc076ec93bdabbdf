"""torch's meshes as networks, and whether torch has joined a job already."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cubeloom.base.errors import UserError
from cubeloom.base.grid import AXES, Grid
from cubeloom.comm import devices
from cubeloom.comm.network import Network

Mesh = Network | DeviceMesh


def network_of(mesh: Mesh) -> Network:
    """The network of a mesh. A torch mesh must have these axis names and the ranks of the job in order."""
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


def joined() -> bool:
    """Whether this process is a rank already."""
    return dist.is_initialized()


def default_device() -> devices.Kind:
    """The device kind of the ranks if there are ranks; otherwise a GPU if torch sees one."""
    if dist.is_initialized():
        return "cuda" if dist.get_backend() == devices.BACKENDS["cuda"] else devices.CPU
    return "cuda" if torch.cuda.is_available() else devices.CPU
