"""How devices are joined: links inside a node, NICs between nodes, and what lies between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from cubeloom.plan.hardware.device import Device
from cubeloom.plan.hardware.facts import Fact, number
from cubeloom.plan.hardware.software import OWN, Software


@dataclass(frozen=True)
class Tier:
    """A unit of so many consecutive devices, and the way out of it, which all of them share."""

    devices: int = number(1)
    bandwidth: float = number(1)  # bytes/s out of the unit, and as much into it
    latency: float = number()  # seconds a hop


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks lie on devices in order, a node full at a time."""

    name: str
    about: str
    device: Device
    nodes: int = number(1)
    devices_per_node: int = number(1)
    link_bandwidth: float = number(1)  # of a device to all others of its node together
    pair_bandwidth: float = number(1)  # between two devices of a node
    link_latency: float = number()  # seconds a hop inside a node
    link_drag: float = number()  # the share of computation that a transfer inside a node takes while it runs
    nics: int = number(1)  # of a node
    nic_bandwidth: float = number(1)  # of each, each way
    nic_latency: float = number()  # seconds a hop between nodes
    nic_drag: float = number()
    start: float = number()  # seconds before the first byte of a collective moves
    eager_fraction: float = (
        number()
    )  # of the bandwidth, in the protocol for small messages that hides hops; 0: there is none
    inner_tiers: tuple[Tier, ...] = ()  # between a device and its node, for instance sockets
    outer_tiers: tuple[Tier, ...] = ()  # beyond the node, for instance racks with a tapered way out
    jitter: float = number(default=0.01)  # by how much devices differ in speed: one standard deviation, as a share
    skew: float = number(1, default=1.0)  # of a collective between layers: what it takes over what it takes in a loop
    software: Software = OWN
    facts: Mapping[str, Fact] = field(default_factory=dict, compare=False, repr=False)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """From the device outwards; a transfer is held up by the narrowest way out among the units that it leaves."""
        port = Tier(1, self.link_bandwidth, self.link_latency)
        node = Tier(self.devices_per_node, self.nics * self.nic_bandwidth, self.nic_latency)
        return (port, *self.inner_tiers, node, *self.outer_tiers)
