"""Chimera with split backward: its placement, B split into I and W, list-scheduled under Chimera's own memory cap.

Weight gradients fill the bubbles that Chimera leaves within and between its units. From N = D up, with F = I = W, only
the D/2 - 1 slots remain in which the middle workers wait for the first micro-batch.
"""

from __future__ import annotations

from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.listing import Layout
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.schedules.chimera import chimera_pipelines
from cubeloom.pipeline.search import search


def chimera_zb(
    stages: int, microbatches: int, pairs: int = 1, costs: Costs | None = None, tries: int = 1000
) -> Schedule:
    """No worker holds more than D micro-batches. The order is optimised for `costs`, by default F = I = W."""
    layout = bidirectional("chimera-zb", stages, microbatches, pairs)
    costs = costs or Costs.uniform(stages)
    cap = stages * max(costs.activation)
    return search("chimera-zb", layout, costs, cap, tries).schedule


def bidirectional(name: str, stages: int, microbatches: int, pairs: int) -> Layout:
    pipelines = chimera_pipelines(name, stages, microbatches, pairs)
    return Layout(stages, stages, tuple(p.workers for p in pipelines), tuple(p.microbatches for p in pipelines))
