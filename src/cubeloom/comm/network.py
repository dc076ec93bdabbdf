"""This rank's membership of a live grid: its coordinates, one communicator per axis, the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError, counted
from cubeloom.base.grid import AXES, Grid
from cubeloom.comm import devices, world
from cubeloom.comm.axis import Axis
from cubeloom.comm.comm_trace import CommTrace, SimulatedLink
from cubeloom.comm.host_group import HostGroup
from cubeloom.comm.ledger import Ledger
from cubeloom.comm.meeting import meeting
from cubeloom.comm.recorder import Recorder, Waits
from cubeloom.comm.watch import Watch

# The order in which DTensor cuts: z within x or y, and data within z, so that each is a contiguous piece of the one before.
MESH_AXES = ("pipe", "x", "y", "z", "data")
CUBE = ("x", "y", "z")


class Network:
    """Join the ranks of the default process group into a grid. Several networks can live in one process.

    `patience`: no wait for another rank may last longer, in seconds; by default torch's own limit holds. On a GPU waits
    are the stream's, not ours: there a `watch` looks after them. `wire` slows all communication down, for measurements.
    Large collectives are cut over `lanes` communicators. `host_group` is one that the ranks have already.
    """

    def __init__(
        self,
        grid: Grid,
        device: torch.device | None = None,
        patience: float | None = None,
        wire: SimulatedLink | None = None,
        lanes: int = 1,
        host_group: HostGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise UserError("join a process group first: run under `cubeloom`, torchrun, or cubeloom.launch.run")
        if dist.get_world_size() != grid.world:
            raise UserError(
                f"the grid {grid} needs {counted(grid.world, 'rank')} and this job has {dist.get_world_size()}; "
                f"change the grid or start {counted(grid.world, 'rank')}"
            )
        self.grid = grid
        self.device = device or torch.device("cpu")
        self.rank = dist.get_rank()
        self.coordinates = grid.coordinates(self.rank)
        self._recorder = Recorder(self.device, wire)
        self.watch = Watch(f"rank {self.rank}", patience) if patience and self.device.type != "cpu" else None
        self._limit = self.watch or (timedelta(seconds=patience) if patience else None)
        ranks = torch.tensor([grid.rank(grid_coordinates) for grid_coordinates in _all_coordinates(grid)])
        self._patience = patience
        self._aside = host_group
        with self._meeting("axes"):
            self.mesh = DeviceMesh(
                self.device.type,
                ranks.view([grid.size(axis) for axis in MESH_AXES]),
                mesh_dim_names=MESH_AXES,
            )
        for name in MESH_AXES:
            self._limit_waits(self.mesh.get_group(name))
        self.cube_mesh = self.mesh[CUBE]
        self.models: WeakSet[Any] = WeakSet()  # that are cut over it, for who must know all of a model
        self.gradients: WeakSet[Any] = WeakSet()  # who sums those of parameters whose rows are arranged, and knows how
        self._lanes = lanes
        self._axes: dict[tuple[str, ...], Axis] = {}
        if self._lanes > 1:
            for name in MESH_AXES[1:]:
                self.axis(name)

    def __deepcopy__(self, memo: dict[int, object]) -> Network:
        """A copy of a model is on the same ranks."""
        return self

    def axis(self, *names: str) -> Axis:
        """The axis of this name; of several names, one group over all of them, the last varying fastest.

        Axes of size 1 are left out, so that equal groups are one object. A group of several axes is made when first asked
        for, by all ranks of the job together: all must ask in the same order.
        """
        wide = tuple(name for name in names if self.grid.size(name) > 1)
        key = wide or names[:1]
        if key not in self._axes:
            self._axes[key] = self._make(key)
        return self._axes[key]

    def across(self, workers: tuple[int, ...], *names: str) -> Axis:
        """One group over these places on the pipe axis and the axes named; asked for as `axis` is, by all ranks.

        Only ranks at one of the places have a use for what they get.
        """
        wide = tuple(name for name in names if self.grid.size(name) > 1)
        if len(workers) == 1:
            return self.axis(*names)
        key = (*map(str, workers), *wide)
        if key not in self._axes:
            lines = [self._line(rank, workers, wide) for rank in range(self.grid.world)]
            self._axes[key] = self._join("+".join(("pipe", *wide)), lines)
        return self._axes[key]

    def neighbours(self, name: str, count: int) -> Axis:
        """So many ranks next to one another on an axis, of which there are several times as many; asked for as `axis` is."""
        if count == self.grid.size(name):
            return self.axis(name)
        key = (name, f"by {count}")
        if key not in self._axes:
            lines = []
            for rank in range(self.grid.world):
                first = self.grid.coordinates(rank)[name] // count * count
                lines.append(self.grid.line(rank, (name,))[first : first + count])
            self._axes[key] = self._join(name, lines)
        return self._axes[key]

    @property
    def waits_on_device(self) -> bool:
        """A receive that waits for its send holds up the device, as NCCL's do; gloo's only hold a buffer."""
        return self.device.type != "cpu"

    def edge(self, source: int, target: int) -> Axis:
        """A channel from one place on the pipe axis to another: index 0 sends to index 1. Made by all ranks together.

        No message may queue behind one that nobody has asked for yet. NCCL runs a communicator's messages in their order, so
        that each direction gets its own; gloo matches messages by sender and receiver, so that all can share one.
        """
        if not self.waits_on_device:
            line = self._line(self.rank, (source, target), ())
            if self.rank not in line:
                return Axis("pipe", [self.rank], 0, (), self._recorder)
            return Axis("pipe", line, line.index(self.rank), [self.mesh.get_group("pipe")], self._recorder, self._limit)
        lines = [self._line(rank, (source, target), ()) for rank in range(self.grid.world)]
        return self._join("pipe", lines, lanes=1)

    def _limit_waits(self, group: dist.ProcessGroup) -> None:
        if isinstance(self._limit, timedelta):
            torch_private.limit_waits(group, self._limit.total_seconds())

    def _line(self, rank: int, workers: tuple[int, ...], names: tuple[str, ...]) -> list[int]:
        """The ranks at these places of the pipe axis that else differ from `rank` only along the axes named."""
        here = self.grid.coordinates(rank)
        places = [self.grid.rank({**here, "pipe": worker}) for worker in workers]
        return [each for place in places for each in self.grid.line(place, names)]

    def _make(self, names: tuple[str, ...]) -> Axis:
        if len(names) > 1:
            return self._join("+".join(names), [self.grid.line(rank, names) for rank in range(self.grid.world)])
        if self._lanes > 1 and self.grid.size(names[0]) > 1 and names[0] != "pipe":
            return self._join(names[0], [self.grid.line(rank, names) for rank in range(self.grid.world)])
        ranks = self.grid.line(self.rank, names)
        groups = [self.mesh.get_group(names[0])] if len(ranks) > 1 else []
        return Axis(names[0], ranks, ranks.index(self.rank), groups, self._recorder, self._limit)

    def _join(self, name: str, lines: list[list[int]], lanes: int | None = None) -> Axis:
        """Make the groups of every line of ranks, and give this rank's. A rank on none of them gets an axis of its own.

        torch names a group by how many there are, so that all ranks must make all groups, their own or not.
        """
        mine = Axis(name, [self.rank], 0, (), self._recorder)
        for line in dict.fromkeys(map(tuple, lines)):
            with self._meeting(name):
                groups = [dist.new_group(sorted(line)) for _ in range(lanes or self._lanes)]
            if self.rank in line:
                for group in groups:
                    self._limit_waits(group)
                mine = Axis(name, list(line), line.index(self.rank), groups, self._recorder, self._limit)
        return mine

    @property
    def everybody(self) -> Axis:
        """All ranks of the grid."""
        ranks, group = list(range(self.grid.world)), dist.group.WORLD
        assert group is not None
        return Axis("+".join(AXES), ranks, self.rank, [group], self._recorder, self._limit)

    def shard(self, batch: Any) -> Any:
        """This rank's samples of a batch that all ranks have, on its device: of every tensor in it, by its first dimension."""
        return torch_private.tree_map(self._own_samples, dict(batch) if isinstance(batch, Mapping) else batch)

    def _own_samples(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return (self.share(value) if value.dim() else value).to(self.device)

    def share(self, samples: torch.Tensor) -> torch.Tensor:
        """This rank's samples of a batch that all ranks have."""
        return samples[self.grid.share(self.coordinates, samples.shape[0])]

    @contextmanager
    def recording(self) -> Iterator[Ledger]:
        """Write every communication inside the block into the ledger it gives."""
        with self._recorder.recording() as ledger:
            yield ledger

    def again(self, done: Ledger) -> None:
        """What is in this ledger was done once more, by a recording: for the ledger that is being written."""
        self._recorder.again(done)

    @contextmanager
    def timing(self) -> Iterator[CommTrace]:
        """Write when every communication inside the block was started and awaited into the journal it gives."""
        with self._recorder.timing() as journal:
            yield journal

    @contextmanager
    def waiting(self) -> Iterator[Waits]:
        """Write how long every wait for others took into the list it gives. Cheap enough for every step."""
        with self._recorder.waiting() as waits:
            yield waits

    @property
    def rehearsed(self) -> bool:
        """The other ranks of the job are not there."""
        return dist.get_backend() not in devices.BACKENDS.values()

    @cached_property
    def host_group(self) -> HostGroup:
        """All ranks once more, to hand each other what is no tensor. First asked for by all ranks together."""
        return self._aside or self.new_host_group()

    def new_host_group(self) -> HostGroup:
        """For another thread; made by all ranks together."""
        with self._meeting("host_group"):
            return HostGroup(self._patience)

    def _meeting(self, groups: str) -> AbstractContextManager[None]:
        return meeting(f"rank {self.rank}", f"making the groups of {self.grid}, {groups}", self._patience)

    def barrier(self) -> None:
        world.barrier()


def _all_coordinates(grid: Grid) -> Iterator[dict[str, int]]:
    """Coordinates in the mesh's order."""
    plain = Grid(**grid.sizes, placement=MESH_AXES)
    for rank in range(grid.world):
        yield plain.coordinates(rank)


assert set(MESH_AXES) == set(AXES)
