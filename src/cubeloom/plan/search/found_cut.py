"""A search for a model whose cut is found: planes are traced until those of the plans that are shown all were."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cubeloom.plan.hardware import Cluster
from cubeloom.plan.model.found import FoundModel, Plane
from cubeloom.plan.search.answer import Answer, search
from cubeloom.plan.search.refine import SURE


def search_found(
    model: FoundModel,
    machine: Cluster | str,
    devices: int,
    *asked: Any,
    show: int = SURE,
    planes: Iterable[Plane] = (),
    **options: Any,
) -> Answer:
    """As `search`. `planes`: x and y that are asked about besides those of the first plans."""
    model.trace(set(planes))
    while True:
        answer = search(model.on(devices), machine, devices, *asked, **options)
        if not model.trace({(plan.grid.x, plan.grid.y) for plan in answer.plans[:show]}):
            return answer
