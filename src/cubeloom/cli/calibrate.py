"""`cubeloom calibrate`: measure this machine, and write it as a device and a cluster that plans can be made for."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import tyro
from rich.console import Console
from rich.table import Table

from cubeloom.base import host
from cubeloom.base.errors import UserError
from cubeloom.base.files import write_asked
from cubeloom.comm.kinds import CPU, Kind
from cubeloom.plan.hardware import Cluster, Dtype, written
from cubeloom.plan.hardware.facts import Fact

if TYPE_CHECKING:
    from cubeloom.plan.hardware.measured import Shape, Transfer

_GROUPS = (2, 4, 8, 16)
_SIDES = {True: (64, 256, 1024), False: (256, 1024, 2048, 4096, 8192)}  # of products, on the host or a GPU


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this machine: products, memory, the cost of an operator; all-reduce, all-gather and messages of local ranks.

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
        machine, errors = self._measured(kind)
        if self.output is not None:
            write_asked(self.output, written(machine))
        spent = time.monotonic() - begin
        console = Console(stderr=self.json)
        console.print(facts_table(machine))
        told = "; ".join(f"{what} are predicted to {off:.0%} in the mean" for what, off in errors.items())
        console.print(f"{told}; measured in {spent:.0f} s", highlight=False)
        if self.json:
            facts = {**as_json(machine.device.facts), **as_json(machine.facts)}
            print(json.dumps({"name": machine.name, "seconds": spent, "errors": errors, **facts}))
        return 0

    def _kind(self) -> Kind:
        from cubeloom.comm import devices

        if self.device is None:
            return next((each for each in reversed(get_args(Kind)) if devices.available(each)), CPU)
        if not devices.available(self.device):
            raise UserError(f"--device {self.device}: torch sees none here; use --device {CPU}")
        return self.device

    def _measured(self, kind: Kind) -> tuple[Cluster, dict[str, float]]:
        from cubeloom.comm import devices
        from cubeloom.launch import RankPool
        from cubeloom.launch.share_gpu import sharing
        from cubeloom.plan.hardware.calibrate import fitted_cluster, fitted_device, missed_transfers
        from cubeloom.plan.hardware.measure import measure_device
        from cubeloom.plan.hardware.measure_links import measure_links

        is_host = kind == CPU
        here = host.cores() if is_host else devices.count(kind)
        per_node = here * self.share_gpu
        groups = tuple(
            group for group in _GROUPS if group <= per_node
        )  # more would wait for a device, not for each other
        source = f"cubeloom calibrate on {platform.node()}, {time.strftime('%Y-%m-%d')}, torch {host.version('torch')}"
        sizes = (2**12, 2**22) if self.quick else (2**12, 2**16, 2**20, 2**24)
        with sharing(per_node, kind), RankPool(max(groups, default=1), kind) as pool:
            patience = 0.03 if self.quick else 0.2
            # Ranks that share a GPU are measured together, as they will compute.
            found = pool.run(self.share_gpu, measure_device, kind, self._shapes(is_host), patience)[0]
            found = replace(found, memory=found.memory // self.share_gpu)
            transfers: list[Transfer] = []
            for group in groups:
                transfers += slowest(pool.run(group, measure_links, kind, group, sizes, 5 if self.quick else 10))
        device, missed = fitted_device(self.name, found, source)
        device = replace(device, kind=kind)
        machine = fitted_cluster(self.name, device, per_node, transfers, source, crowd=0.5 if is_host else 0.15)
        links = missed_transfers(machine, transfers)
        return machine, {"products": missed} | ({} if links is None else {"transfers": links})

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
    table = Table("", "value", "", title=f"{machine.name}: {machine.about}")
    for name, fact in (*machine.device.facts.items(), *machine.facts.items()):
        table.add_row(name, f"{fact.value:.4g}", fact.confidence)
    return table
