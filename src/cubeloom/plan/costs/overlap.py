"""How communication slows the computation that it overlaps."""

from __future__ import annotations

import numpy as np

from cubeloom.plan.costs.quantity import Quantity


def together(compute: Quantity, communication: Quantity, drag: Quantity = 0.0) -> Quantity:
    """Seconds until both are done, if they start at once and do not wait for each other.

    During communication, computation runs at 1 - drag of its speed. It has lost `drag · communication` when
    communication ends, unless it ends first.
    """
    return np.maximum(communication, compute + drag * communication)


def exposed(compute: Quantity, communication: Quantity, drag: Quantity = 0.0) -> Quantity:
    """The exposed communication: what it adds to the time of computation."""
    return together(compute, communication, drag) - compute
