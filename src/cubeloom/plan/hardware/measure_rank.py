"""Everything that a rank measures, one thing after another: all ranks of a job do the same at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cubeloom.comm import devices
from cubeloom.plan.hardware.device import Dtype
from cubeloom.plan.hardware.measure import measure_device
from cubeloom.plan.hardware.measure_links import measure_drag, measure_links, network_of
from cubeloom.plan.hardware.measured import Heads, RankMeasurements, Shape, Transfer


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """What is measured, and how long."""

    kind: devices.Kind
    nodes: int
    per_node: int
    shapes: dict[Dtype, tuple[Shape, ...]]
    heads: tuple[Heads, ...]
    patience: float  # seconds of each operator
    sizes: tuple[int, ...]  # bytes of transfers
    repeats: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def groups(self) -> Iterator[tuple[int, int]]:
        """Sizes and strides: inside a node every doubling, of neighbours and of ranks far apart; and over all nodes."""
        group = 2
        while group <= self.per_node:
            if self.per_node % group == 0:
                yield group, 1
                if group < self.per_node:
                    yield group, self.per_node // group
            group *= 2
        if self.per_node > 2 and self.per_node & (self.per_node - 1):
            yield self.per_node, 1
        if self.nodes > 1:
            yield self.nodes, self.per_node
            if self.per_node > 1:
                yield self.ranks, 1


def measure_rank(what: Measuring) -> RankMeasurements:
    device = measure_device(what.kind, what.shapes, what.heads, what.patience)
    transfers: list[Transfer] = []
    drags: dict[tuple[int, int], float] = {}
    for group, stride in what.groups():
        network = network_of(what.kind, what.ranks, group, stride)
        transfers += measure_links(network, stride, what.sizes, what.repeats)
        drags[group, stride] = measure_drag(network, what.sizes[-1], what.repeats)
    return RankMeasurements(device, transfers, drags)
