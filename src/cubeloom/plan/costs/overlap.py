"""How communication slows the computation that it overlaps."""

from __future__ import annotations

import numpy as np

from cubeloom.plan.costs.collectives import members
from cubeloom.plan.costs.quantity import Quantity
from cubeloom.plan.hardware.cluster import Cluster


def drag(cluster: Cluster, group: Quantity, rank_stride: Quantity = 1) -> Quantity:
    """The fraction of its computation that a device loses while a transfer of such a group runs."""
    crosses = members(group, rank_stride, cluster.devices_per_node) < group
    return np.where(np.equal(group, 1), 0.0, np.where(crosses, cluster.nic_drag, cluster.link_drag))[()]


def together(compute: Quantity, communication: Quantity, drag: Quantity = 0.0) -> Quantity:
    """Seconds until both are done, if they start at once and do not wait for each other.

    During communication, computation runs at 1 - drag of its speed. It has lost `drag · communication` when
    communication ends, unless it ends first.
    """
    return np.maximum(communication, compute + drag * communication)


def exposed(compute: Quantity, communication: Quantity, drag: Quantity = 0.0) -> Quantity:
    """The exposed communication: what it adds to the time of computation."""
    return together(compute, communication, drag) - compute
