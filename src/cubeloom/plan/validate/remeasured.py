"""The cluster as measured plans of it are: three factors on its file, fitted to their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from cubeloom.plan.hardware import Cluster, Device, Fact
from cubeloom.plan.search import Answer, Plan
from cubeloom.plan.search.refine import plan_seconds
from cubeloom.plan.validate.fit import Constants, fitted
from cubeloom.plan.validate.table import Floats

# The steps were measured on the machine itself: only a peak limits what they may say of it.
_LEAST, _MOST = np.log([0.1, 0.1, 0.1]), np.log([1.17, 10.0, 10.0])
_SOME = TypeVar("_SOME", Cluster, Device)


def remeasured(answer: Answer, plans: Sequence[Plan], seconds: Sequence[float], source: str) -> Cluster:
    """The answer's cluster, on which these plans are predicted to take about so many seconds."""

    def predicted(constants: Constants) -> Floats:
        there = constants.on(answer.cluster)
        return np.array([plan_seconds(answer.model, there, answer.task, answer.dtype, plan) for plan in plans])

    return told(answer.cluster, fitted(predicted, np.array(seconds), _LEAST, _MOST), source)


def told(cluster: Cluster, constants: Constants, source: str) -> Cluster:
    """With these factors, and the source of each number that they changed."""
    made = constants.on(cluster)
    return _sourced(cluster, replace(made, device=_sourced(cluster.device, made.device, source)), source)


def _sourced(before: _SOME, after: _SOME, source: str) -> _SOME:
    changed: dict[str, Fact] = {}
    for each in fields(after):
        was, value = getattr(before, each.name), getattr(after, each.name)
        if "least" in each.metadata and value != was:
            changed[each.name] = Fact(float(f"{value:.4g}"), f"{source}; it was {was:.4g}", "measured")
    values: dict[str, Any] = {name: fact.value for name, fact in changed.items()}
    return replace(after, facts={**before.facts, **changed}, **values)
