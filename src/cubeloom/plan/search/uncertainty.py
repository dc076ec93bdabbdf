"""How far a predicted time may be off: each part of it by as much as the facts it follows from are trusted."""

from __future__ import annotations

from cubeloom.plan.hardware import Cluster
from cubeloom.plan.hardware.facts import Confidence

# One standard deviation of a number, as a share of it.
_TRUST: dict[Confidence, float] = {"measured": 0.03, "published": 0.08, "estimated": 0.15}
_COMPUTE = ("matmul_fraction", "bandwidth_fraction")
_NETWORK = ("link_bandwidth", "nic_bandwidth", "nic_latency")


def uncertainty(cluster: Cluster, exposed: float) -> float:
    """One standard deviation of a step's time, as a share of it. A pipeline's bubble is as sure as what is computed."""
    device = max(_TRUST[cluster.device.facts[name].confidence] for name in _COMPUTE)
    network = max(_TRUST[cluster.facts[name].confidence] for name in _NETWORK)
    return float((((1 - exposed) * device) ** 2 + (exposed * network) ** 2) ** 0.5)
