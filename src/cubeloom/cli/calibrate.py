"""`cubeloom calibrate`: measure this machine, and write it as a device and a cluster that plans can be made for."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, get_args

import tyro
from rich.console import Console
from rich.table import Table

from cubeloom.base import host
from cubeloom.base.errors import UserError
from cubeloom.base.files import write_asked
from cubeloom.comm.kinds import CPU, Kind
from cubeloom.launch.environment import current, membership
from cubeloom.plan.hardware import Cluster, Dtype, written
from cubeloom.plan.hardware.facts import Fact

if TYPE_CHECKING:
    from cubeloom.plan.hardware.measure_rank import Measuring
    from cubeloom.plan.hardware.measured import RankMeasurements, Shape, Transfer

_MOST = 16  # ranks of one machine that are measured: more would wait for a device, not for each other
# Of attention, on the host or a GPU: length, heads, features of a head.
_HEADS = {
    True: ((256, 4, 64), (512, 4, 64), (1024, 4, 64), (512, 4, 128), (512, 16, 64)),
    False: ((1024, 16, 128), (4096, 16, 128), (1024, 16, 64), (4096, 16, 64), (4096, 64, 128), (8192, 16, 128)),
}
_SIDES = {True: (64, 256, 1024), False: (256, 1024, 2048, 4096, 8192)}  # of products, on the host or a GPU


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this machine: products, attention, memory, the optimizer, the cost of an operator; collectives and messages
    by size, group and stride, and what they take from computation. Started with torchrun or srun, it measures all nodes.

    A device is what one rank computes on: a GPU, or one core. `cubeloom` commands take the file in place of a cluster's name.
    """

    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o", "--out"])] = None
    """The TOML file to write; without it, only what was measured is shown."""
    name: str = "this-machine"
    device: Kind | None = None
    """The GPUs where there are any, otherwise the cores."""
    share_gpu: int = 1
    """So many ranks share each GPU, side by side (CUDA's MPS); each is a device of what is written."""
    quick: bool = False
    """Fewer sizes and repeats: seconds instead of a quarter of a minute."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        kind = self._kind()
        if self.output is not None and not self.output.parent.is_dir():
            raise UserError(f"no folder {self.output.parent} to write {self.output.name} in")
        if self.share_gpu < 1 or (self.share_gpu > 1 and kind == CPU):
            raise UserError(
                f"--share-gpu {self.share_gpu}: one or more ranks can share a GPU, and on a CPU each has its core"
            )
        begin = time.monotonic()
        machine = self._measured(kind)
        here = membership(current())
        if here is not None and here.rank > 0:
            return 0
        if self.output is not None:
            write_asked(self.output, written(machine))
        spent = time.monotonic() - begin
        console = Console(stderr=self.json)
        console.print(facts_table(machine))
        console.print(
            f"scatter is of what was measured around the planner's cost model; measured in {spent:.0f} s",
            highlight=False,
        )
        if self.json:
            parts = {**machine.device.facts, **machine.facts}
            scatter = {name: fact.scatter for name, fact in parts.items() if fact.scatter is not None}
            print(json.dumps({"name": machine.name, "seconds": spent, "scatter": scatter, **as_json(parts)}))
        return 0

    def _kind(self) -> Kind:
        from cubeloom.comm import devices

        if self.device is None:
            return next((each for each in reversed(get_args(Kind)) if devices.available(each)), CPU)
        if not devices.available(self.device):
            raise UserError(f"--device {self.device}: torch sees none here; use --device {CPU}")
        return self.device

    def _measured(self, kind: Kind) -> Cluster:
        from cubeloom.plan.hardware.calibrate import fitted_cluster, fitted_device

        what, found, per_node = self._on_ranks(kind)
        source = f"cubeloom calibrate on {platform.node()}, {time.strftime('%Y-%m-%d')}, torch {host.version('torch')}"
        first = replace(found[0].device, memory=found[0].device.memory // self.share_gpu)
        device = replace(fitted_device(self.name, first, source), kind=kind)
        transfers = slowest([each.transfers for each in found])
        drags = {key: fmean(each.drags[key] for each in found) for key in found[0].drags}
        return fitted_cluster(self.name, device, per_node, what.nodes, transfers, drags, source)

    def _on_ranks(self, kind: Kind) -> tuple[Measuring, list[RankMeasurements], int]:
        """What was measured, by rank, and the devices of a node: by the ranks of a launcher's job, or by local ones."""
        from cubeloom.comm import HostGroup, devices, world
        from cubeloom.launch import RankPool
        from cubeloom.launch.ready import join
        from cubeloom.launch.share_gpu import sharing
        from cubeloom.plan.hardware.measure_rank import measure_rank

        here = membership(current())
        if here is None:
            per_node = (host.cores() if kind == CPU else devices.count(kind)) * self.share_gpu
            what = self._what(kind, 1, min(per_node, _MOST))
            with sharing(what.ranks, kind), RankPool(what.ranks, kind) as pool:
                return what, pool.run(what.ranks, measure_rank, what, timeout=600), per_node
        join(here, kind, 300)
        group = HostGroup()
        machines = Counter(group.gather(platform.node()))
        per_node = machines[platform.node()]
        if len(set(machines.values())) > 1:
            raise UserError(f"the machines of this job have different numbers of ranks: {dict(machines)}")
        what = self._what(kind, len(machines), per_node)
        found = group.gather(measure_rank(what))
        world.leave()
        return what, found, per_node

    def _what(self, kind: Kind, nodes: int, per_node: int) -> Measuring:
        from cubeloom.plan.hardware.measure_rank import Measuring

        return Measuring(
            kind=kind,
            nodes=nodes,
            per_node=per_node,
            shapes=self._shapes(kind == CPU),
            heads=_HEADS[kind == CPU][: 2 if self.quick else None],
            patience=0.03 if self.quick else 0.2,
            sizes=(2**12, 2**22) if self.quick else (2**12, 2**16, 2**20, 2**24),
            repeats=5 if self.quick else 10,
        )

    def _shapes(self, is_host: bool) -> dict[Dtype, tuple[Shape, ...]]:
        """Squares, and what is long in one direction."""
        sides = _SIDES[is_host][:-1] if self.quick else _SIDES[is_host]
        square = tuple((side, side, side) for side in sides)
        long = tuple((side, 4 * side, side) for side in sides[:-1]) + tuple(
            (side, side, 4 * side) for side in sides[:-1]
        )
        shapes = square if self.quick else square + long
        measured: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
        return dict.fromkeys(measured, shapes)


def slowest(by_rank: list[list[Transfer]]) -> list[Transfer]:
    """A collective has lasted as long as it did for its slowest rank."""
    return [max(same, key=lambda each: each.seconds) for same in zip(*by_rank, strict=True)]


def as_json(facts: Mapping[str, Fact]) -> dict[str, float]:
    return {name: fact.value for name, fact in facts.items()}


def facts_table(machine: Cluster) -> Table:
    table = Table("", "value", "scatter", "", title=f"{machine.name}: {machine.about}")
    for name, fact in (*machine.device.facts.items(), *machine.facts.items()):
        table.add_row(name, f"{fact.value:.4g}", "" if fact.scatter is None else f"{fact.scatter:.0%}", fact.confidence)
    return table
