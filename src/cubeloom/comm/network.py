"""This rank's membership in a live grid: its coordinates, one communicator per axis, the ledger."""

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
from cubeloom.comm.batch import Parts, batch_tensor, gathered
from cubeloom.comm.batch.sums import own_samples
from cubeloom.comm.comm_trace import CommTrace, SimulatedLink
from cubeloom.comm.host_group import HostGroup, check_process_group
from cubeloom.comm.ledger import Ledger
from cubeloom.comm.meeting import meeting
from cubeloom.comm.recorder import Recorder, Waits
from cubeloom.comm.watch import Watch

# The order in which DTensor cuts: z within x or y, and data within z, so that each shard is a contiguous part of the
# one before.
MESH_AXES = ("pipe", "x", "y", "z", "data")
CUBE = ("x", "y", "z")


class Network:
    """Join the ranks of the default process group into a grid. Several networks can exist in one process.

    `timeout`: the most seconds to wait for another rank; by default torch's own timeout. On a GPU the stream waits and
    not the host: there a `watch` monitors it. `wire` slows all communication down, for measurements. Large collectives
    are split over `num_comm_channels` communicators. `host_group`: one that the ranks already have.
    """

    def __init__(
        self,
        grid: Grid,
        device: torch.device | None = None,
        timeout: float | None = None,
        wire: SimulatedLink | None = None,
        num_comm_channels: int = 1,
        host_group: HostGroup | None = None,
    ) -> None:
        check_process_group(", ".join(f"{axis}={grid.size(axis)}" for axis in AXES if grid.size(axis) > 1))
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
        self.watch = Watch(f"rank {self.rank}", timeout) if timeout and self.device.type != "cpu" else None
        self._limit = self.watch or (timedelta(seconds=timeout) if timeout else None)
        ranks = torch.tensor([grid.rank(grid_coordinates) for grid_coordinates in _all_coordinates(grid)])
        self._timeout = timeout
        self._host_group = host_group
        with self._meeting("axes"):
            self.mesh = DeviceMesh(
                self.device.type,
                ranks.view([grid.size(axis) for axis in MESH_AXES]),
                mesh_dim_names=MESH_AXES,
            )
        for name in MESH_AXES:
            self._limit_waits(self.mesh.get_group(name))
        self.cube_mesh = self.mesh[CUBE]
        self.models: WeakSet[Any] = WeakSet()  # models cut over this grid, for code that needs the whole model
        self.gradients: WeakSet[Any] = WeakSet()  # reducers of gradients of parameters with arranged rows
        self._num_comm_channels = num_comm_channels
        self._axes: dict[tuple[str, ...], Axis] = {}
        if self._num_comm_channels > 1:
            for name in MESH_AXES[1:]:
                self.axis(name)

    def __deepcopy__(self, memo: dict[int, object]) -> Network:
        """A copied model is on the same ranks."""
        return self

    def axis(self, *names: str) -> Axis:
        """The axis of this name; for several names, one process group over all of them, the last varying fastest.

        Axes of size 1 are left out, so that equal groups are one object. A group of several axes is created at its
        first use, by all ranks of the job together: all must ask in the same order.
        """
        wide = tuple(name for name in names if self.grid.size(name) > 1)
        key = wide or names[:1]
        if key not in self._axes:
            self._axes[key] = self._make(key)
        return self._axes[key]

    def across(self, workers: tuple[int, ...], *names: str) -> Axis:
        """One process group over these workers of the pipe axis and the named axes, created by all ranks as in `axis`.

        Only ranks of these workers use the result.
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
        """`count` neighbouring ranks of an axis whose size is a multiple of it, created by all ranks as in `axis`."""
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
        """Whether a receive blocks the device until its send, as NCCL's do. gloo's receives only occupy a buffer."""
        return self.device.type != "cpu"

    def edge(self, source: int, target: int) -> Axis:
        """A channel from one worker of the pipe axis to another: index 0 sends to index 1. Created by all ranks
        together.

        No message may queue behind one that is not awaited yet. NCCL runs a communicator's messages in order, so each
        direction gets its own. gloo matches messages by sender and receiver, so all can share one.
        """
        if not self.waits_on_device:
            line = self._line(self.rank, (source, target), ())
            if self.rank not in line:
                return Axis("pipe", [self.rank], 0, (), self._recorder)
            return Axis("pipe", line, line.index(self.rank), [self.mesh.get_group("pipe")], self._recorder, self._limit)
        lines = [self._line(rank, (source, target), ()) for rank in range(self.grid.world)]
        return self._join("pipe", lines, num_comm_channels=1)

    def _limit_waits(self, group: dist.ProcessGroup) -> None:
        if isinstance(self._limit, timedelta):
            torch_private.limit_waits(group, self._limit.total_seconds())

    def _line(self, rank: int, workers: tuple[int, ...], names: tuple[str, ...]) -> list[int]:
        """The ranks of these workers that otherwise differ from `rank` only along the named axes."""
        here = self.grid.coordinates(rank)
        places = [self.grid.rank({**here, "pipe": worker}) for worker in workers]
        return [each for place in places for each in self.grid.line(place, names)]

    def _make(self, names: tuple[str, ...]) -> Axis:
        if len(names) > 1:
            return self._join("+".join(names), [self.grid.line(rank, names) for rank in range(self.grid.world)])
        if self._num_comm_channels > 1 and self.grid.size(names[0]) > 1 and names[0] != "pipe":
            return self._join(names[0], [self.grid.line(rank, names) for rank in range(self.grid.world)])
        ranks = self.grid.line(self.rank, names)
        groups = [self.mesh.get_group(names[0])] if len(ranks) > 1 else []
        return Axis(names[0], ranks, ranks.index(self.rank), groups, self._recorder, self._limit)

    def _join(self, name: str, lines: list[list[int]], num_comm_channels: int | None = None) -> Axis:
        """Create the process groups of every line of ranks, and return this rank's. A rank on no line gets its own
        axis.

        torch numbers groups in the order of their creation, so all ranks must create all groups.
        """
        mine = Axis(name, [self.rank], 0, (), self._recorder)
        for line in dict.fromkeys(map(tuple, lines)):
            with self._meeting(name):
                groups = [dist.new_group(sorted(line)) for _ in range(num_comm_channels or self._num_comm_channels)]
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
        """A batch that all ranks have, as tensors of which this rank keeps its samples, on its device.

        To a program they look whole: what it computes of them is what one device would. Samples are the first dimension of
        every tensor that has one. All ranks of data and z must do the same with what they get.
        """
        return torch_private.tree_map(lambda value: self._own_samples(value, whole=True), _plain(batch))

    def from_local(self, batch: Any) -> Any:
        """As `shard` gives it, of samples that each rank of data and z loaded itself: as many on all of them."""
        sizes = {each.shape[0] for each in torch_private.tree_leaves(_plain(batch)) if _has_samples(each)}
        if sizes and self.samples.size > 1:
            own = torch.tensor([max(sizes), -min(sizes)], device=self.device)
            most, least = self.samples.all_reduce(own, "samples of a rank", largest=True).wait().tolist()
            if most != -least:
                raise UserError(
                    f"each rank must load as many samples, and they have from {-least} to {most}: leave out the last batch of"
                    " an epoch where it is not full (drop_last=True)"
                )
        return torch_private.tree_map(lambda value: self._own_samples(value, whole=False), _plain(batch))

    def gather(self, batch: Any) -> Any:
        """The plain whole tensors of what `shard` or a model gives."""
        return torch_private.tree_map(gathered, _plain(batch))

    @property
    def samples(self) -> Axis:
        """Over which a batch is cut."""
        return self.axis("data", "z")

    def _own_samples(self, value: Any, whole: bool) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Parts):
            return value
        if not value.dim():
            return value.to(self.device)
        if whole:
            self.grid.share(self.coordinates, value.shape[0])  # refuses what does not divide
            value = own_samples(value, self.samples, 0)
        return batch_tensor(value.to(self.device), 0, self.samples)

    def share(self, samples: torch.Tensor) -> torch.Tensor:
        """This rank's samples of a batch that all ranks have."""
        return samples[self.grid.share(self.coordinates, samples.shape[0])]

    @contextmanager
    def recording(self) -> Iterator[Ledger]:
        """Write every communication inside the block into the ledger that is returned."""
        with self._recorder.recording() as ledger:
            yield ledger

    def again(self, done: Ledger) -> None:
        """Add to the current ledger what a recording has communicated again."""
        self._recorder.again(done)

    @contextmanager
    def timing(self) -> Iterator[CommTrace]:
        """Write the start and wait of every communication inside the block into the trace that is returned."""
        with self._recorder.timing() as journal:
            yield journal

    @contextmanager
    def waiting(self) -> Iterator[Waits]:
        """Write the duration of every wait for others into the list that is returned. Cheap enough for every step."""
        with self._recorder.waiting() as waits:
            yield waits

    @property
    def rehearsed(self) -> bool:
        """Whether this is a rehearsal, in which the other ranks do not exist."""
        return dist.get_backend() not in devices.BACKENDS.values()

    @cached_property
    def host_group(self) -> HostGroup:
        """All ranks in a CPU process group, for values that are not tensors. Created by all ranks together at first
        use.
        """
        return self._host_group or self.new_host_group()

    def new_host_group(self) -> HostGroup:
        """A group for another thread, created by all ranks together."""
        with self._meeting("host_group"):
            return HostGroup(self._timeout)

    def _meeting(self, groups: str) -> AbstractContextManager[None]:
        return meeting(f"rank {self.rank}", f"making the groups of {self.grid}, {groups}", self._timeout)

    def barrier(self) -> None:
        world.barrier()


def _plain(batch: Any) -> Any:
    """Mappings of others, such as a tokenizer's, as dictionaries."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _has_samples(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _all_coordinates(grid: Grid) -> Iterator[dict[str, int]]:
    """Coordinates in the order of the mesh."""
    plain = Grid(**grid.sizes, placement=MESH_AXES)
    for rank in range(grid.world):
        yield plain.coordinates(rank)


assert set(MESH_AXES) == set(AXES)
