"""How far a predicted time may be off: what the facts leave open that it follows from, and what the model leaves out."""

from __future__ import annotations

from cubeloom.plan.hardware.cluster import Cluster
from cubeloom.plan.hardware.facts import Confidence, Fact

NINETY = 1.645  # standard deviations to either side, between which 90 % of a normal distribution lie
RESIDUAL = 0.1
"""One standard deviation, as a share, with all facts known: how measured steps differ (docs/validate.md)."""

# One standard deviation of a number, as a share of it.
_DEVICE: dict[Confidence, float] = {"measured": 0.02, "published": 0.04, "estimated": 0.06}
_CLUSTER: dict[Confidence, float] = {"measured": 0.05, "published": 0.1, "estimated": 0.2}
_MOST = 0.3  # a machine that scatters more was busy with something else
_COMPUTE = ("matmul_fraction", "bandwidth_fraction")
_NETWORK = ("link_bandwidth", "nic_bandwidth", "nic_latency")
_UNKNOWN = Fact(0.0, "not said", "estimated")


def uncertainty(cluster: Cluster, exposed: float) -> float:
    """One standard deviation of a step's time, as a share of it. A pipeline's bubble is as sure as what is computed."""
    device = max(_deviation(cluster.device.facts.get(name, _UNKNOWN), _DEVICE) for name in _COMPUTE)
    network = max(_deviation(cluster.facts.get(name, _UNKNOWN), _CLUSTER) for name in _NETWORK)
    return float((RESIDUAL**2 + ((1 - exposed) * device) ** 2 + (exposed * network) ** 2) ** 0.5)


def _deviation(fact: Fact, usual: dict[Confidence, float]) -> float:
    """What was seen where it was measured; otherwise what is usual of such a source."""
    return usual[fact.confidence] if fact.scatter is None else min(fact.scatter, _MOST)
