"""Time of collectives on a cluster.

A group is `group` ranks, `rank_stride` apart: the product of the sizes of the grid's axes inside this one. All such
groups of the cluster communicate at once, as on an axis of a grid, and so share the uplinks of nodes. A group of one
takes no time.

Time is latency plus bytes over bandwidth. Latency is the start plus the hops of the first byte. For small messages
libraries have a protocol that sends pieces so small that hops and bytes overlap, at a fraction of the bandwidth. Then
the longer of the two counts, if that is less.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from cubeloom.plan.costs.quantity import Quantity
from cubeloom.plan.hardware.cluster import Cluster

Algorithm = Literal["ring", "halving", "tree", "hierarchical", "best"]


def all_gather(
    cluster: Cluster, nbytes: Quantity, group: Quantity, rank_stride: Quantity = 1, algorithm: Algorithm = "ring"
) -> Quantity:
    """Seconds to give all ranks the whole tensor of `nbytes`, of which each has its share."""
    return _one_way(cluster, nbytes, group, rank_stride, algorithm)


def reduce_scatter(
    cluster: Cluster, nbytes: Quantity, group: Quantity, rank_stride: Quantity = 1, algorithm: Algorithm = "ring"
) -> Quantity:
    """Seconds to give each rank its share of the sum of all ranks' tensors of `nbytes` each."""
    return _one_way(cluster, nbytes, group, rank_stride, algorithm)


def all_reduce(
    cluster: Cluster, nbytes: Quantity, group: Quantity, rank_stride: Quantity = 1, algorithm: Algorithm = "best"
) -> Quantity:
    """Seconds to give all ranks the sum of their tensors, of `nbytes` each. `best`: the faster of ring and tree, as in NCCL."""
    if algorithm == "best":
        ring = all_reduce(cluster, nbytes, group, rank_stride, "ring")
        return np.minimum(ring, all_reduce(cluster, nbytes, group, rank_stride, "tree"))
    # up and down a tree of nodes, along a chain in each; every rank's bytes go in both directions
    if algorithm == "tree":
        hops = 2 * _tree_latency(cluster, group, rank_stride)
        return _seconds(cluster, hops, 2 * nbytes, group, rank_stride)
    return _passes(2, cluster, nbytes, group, rank_stride, algorithm)


def all_to_all(cluster: Cluster, nbytes: Quantity, group: Quantity, rank_stride: Quantity = 1) -> Quantity:
    """Seconds to exchange a tensor of `nbytes` per rank: each keeps one share and sends one to every other rank."""
    slowest: Quantity = 0.0
    for tier in cluster.tiers:
        inside = members(group, rank_stride, tier.devices)
        leaving = tier.devices * nbytes * (group - inside) / group  # of all devices of the unit together
        slowest = np.maximum(slowest, leaving / tier.bandwidth)
    peers = members(group, rank_stride, cluster.devices_per_node)
    to_one = np.where(peers > 1, nbytes / group, 0.0) / cluster.pair_bandwidth
    hops = (peers - 1) * cluster.link_latency + (group - peers) * cluster.nic_latency
    return _unless_alone(group, cluster.start + hops + np.maximum(slowest, to_one))


def send(cluster: Cluster, nbytes: Quantity, group: Quantity, rank_stride: Quantity = 1) -> Quantity:
    """Seconds of a message from each rank to the next of its group, over the slowest hop of the chain. It uses one NIC."""
    bandwidth: Quantity = cluster.pair_bandwidth
    latency: Quantity = cluster.link_latency
    for tier in cluster.tiers:
        leaves = members(group, rank_stride, tier.devices) < group
        share = tier.bandwidth / np.minimum(tier.devices, rank_stride)
        bandwidth = np.where(leaves, np.minimum(bandwidth, share), bandwidth)
        latency = np.where(leaves, tier.latency, latency)
    crosses = members(group, rank_stride, cluster.devices_per_node) < group
    bandwidth = np.where(crosses, np.minimum(bandwidth, cluster.nic_bandwidth), bandwidth)
    return _unless_alone(group, cluster.start + latency + nbytes / bandwidth)


def ring_bandwidth(cluster: Cluster, group: Quantity, rank_stride: Quantity = 1) -> Quantity:
    """Bytes per second of each ring, if all groups of the axis have one.

    The rule of AxoNN (SC24): rings that leave a node share its NICs, min(devices of a node, rank_stride) of them; and
    so for every other unit with one uplink. Inside a node a ring is as fast as a device's links to the other members
    allow.
    """
    peers = members(group, rank_stride, cluster.devices_per_node)
    bandwidth = np.where(peers > 1, (peers - 1) * cluster.pair_bandwidth, np.inf)
    for tier in cluster.tiers:
        leaves = members(group, rank_stride, tier.devices) < group
        share = tier.bandwidth / np.minimum(tier.devices, rank_stride)
        bandwidth = np.where(leaves, np.minimum(bandwidth, share), bandwidth)
    return bandwidth[()]


def members(group: Quantity, rank_stride: Quantity, unit: int) -> Quantity:
    """The number of a group's ranks on one unit of `unit` devices. Groups that do not fill a unit evenly leave it."""
    inside = np.minimum(np.maximum(unit // np.asarray(rank_stride), 1), group)
    straddles = (inside == group) & (unit % np.multiply(group, rank_stride) != 0)
    return np.where(straddles, np.maximum(1, inside - 1), inside)[()]


def _one_way(
    cluster: Cluster, nbytes: Quantity, group: Quantity, rank_stride: Quantity, algorithm: Algorithm
) -> Quantity:
    if algorithm in ("tree", "best"):
        raise ValueError(f"{algorithm} is of all_reduce; here are ring, halving and hierarchical")
    return _passes(1, cluster, nbytes, group, rank_stride, algorithm)


def _passes(
    passes: int, cluster: Cluster, nbytes: Quantity, group: Quantity, rank_stride: Quantity, algorithm: Algorithm
) -> Quantity:
    """An all-gather or reduce-scatter is one pass, an all-reduce is two. Each moves (g-1)/g of the tensor."""
    if algorithm == "hierarchical":  # inside nodes; then between them, each rank with its share of the tensor
        peers = members(group, rank_stride, cluster.devices_per_node)
        nodes = np.ceil(group / peers)
        inside = _passes(1, cluster, nbytes, peers, rank_stride, "ring") * passes
        return inside + _passes(passes, cluster, nbytes / peers, nodes, rank_stride * peers, "ring")
    latency = _halving_latency if algorithm == "halving" else _ring_latency
    return _seconds(
        cluster,
        passes * latency(cluster, group, rank_stride),
        passes * (group - 1) / group * nbytes,
        group,
        rank_stride,
    )


def _seconds(cluster: Cluster, hops: Quantity, moved: Quantity, group: Quantity, rank_stride: Quantity) -> Quantity:
    """The protocol curve: latency, then bytes; or for small messages the longer of the two, at a fraction of the
    bandwidth.
    """
    waited = cluster.start + hops
    moving = moved / ring_bandwidth(cluster, group, rank_stride)
    seconds = waited + moving
    if cluster.eager_fraction > 0:
        seconds = np.minimum(seconds, np.maximum(waited, moving / cluster.eager_fraction))
    return _unless_alone(group, seconds)


def _unless_alone(group: Quantity, seconds: Quantity) -> Quantity:
    return np.where(np.equal(group, 1), 0.0, seconds)[()]  # a plain number if all arguments were


def _units(cluster: Cluster, group: Quantity, rank_stride: Quantity) -> list[Quantity]:
    """The numbers of devices, sockets, nodes, … that a group spans, from the inside out; and 1 for the cluster."""
    return [*(np.ceil(group / members(group, rank_stride, tier.devices)) for tier in cluster.tiers), 1.0]


def _ring_latency(cluster: Cluster, group: Quantity, rank_stride: Quantity) -> Quantity:
    """The latency of a ring's g-1 hops: those that leave a unit, tier by tier."""
    units = _units(cluster, group, rank_stride)
    return sum((t.latency * (units[i] - units[i + 1]) for i, t in enumerate(cluster.tiers)), start=np.float64(0))


def _halving_latency(cluster: Cluster, group: Quantity, rank_stride: Quantity) -> Quantity:
    """The latency of the log2(g) hops of recursive halving or doubling: those that leave a unit, tier by tier."""
    units = _units(cluster, group, rank_stride)
    return sum((t.latency * np.log2(units[i] / units[i + 1]) for i, t in enumerate(cluster.tiers)), start=np.float64(0))


def _tree_latency(cluster: Cluster, group: Quantity, rank_stride: Quantity) -> Quantity:
    """A chain inside each node, a binary tree of nodes."""
    peers = members(group, rank_stride, cluster.devices_per_node)
    nodes = np.ceil(group / peers)
    return (peers - 1) * cluster.link_latency + np.ceil(np.log2(nodes)) * cluster.nic_latency
