"""Gradients that are reduced behind the last backward, on one worker and on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, OurModel, build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, initial_values
from cubeloom.parallel.buckets import Buckets
from cubeloom.parallel.gradients import Gradients
from cubeloom.pipeline import Schedule, Sync, generate, synchronised
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.tools.verify import Experiment
from grids import rest_is_long
from parity import holds
from serial_runs import Verified

GPT = GPTConfig(vocab=96, positions=16, hidden=32, layers=4, heads=4)


def eager(name: str, workers: int, count: int) -> Schedule:
    return synchronised(generate(name, workers, count), Sync.EAGER)


def events(grid: Grid, schedule: Schedule) -> list[str]:
    """Weight gradients as they are computed, and buckets as they are sent, in one step."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(GPT)
    fill = initial_values(model, 0, torch.float64, network.device)
    rest = ShardingPolicy(weights="replicated")
    pipeline = Pipeline(model, cut_of(model), network, Batch(8, 12), fill, schedule, rest)
    pipeline.gradients.buckets.limit = 1  # a bucket for each parameter
    names = {id(each): name for name, each in pipeline.parameters.items()}
    log: list[str] = []

    def logged(owner: type, method: str, words: Callable[[Any], str]) -> Any:
        plain = getattr(owner, method)

        def called(self: Any, what: Any, *others: Any) -> Any:
            log.append(words(what))
            return plain(self, what, *others)

        return patch.object(owner, method, called)

    computed = logged(Gradients, "_compute", lambda wanted: f"compute {names[id(wanted.parameter)]}")
    sent = logged(Buckets, "_send", lambda bucket: f"send {names[id(bucket.parameters[0])]}")
    tokens = torch.arange(96).view(8, 12)[grid.share(network.coordinates, 8)]
    with computed, sent:
        pipeline.step({"tokens": tokens, "targets": tokens})
    return log


@pytest.mark.parametrize(
    ("grid", "name"),
    rest_is_long(
        [("data=2", "1f1b"), ("z=2", "1f1b"), ("pipe=2,data=2", "zb-h1"), ("pipe=2", "chimera")],
        [("data=2", "1f1b"), ("pipe=2,data=2", "zb-h1"), ("pipe=2", "chimera")],
    ),
)
def test_later_blocks_are_reduced_before_earlier_ones_are_computed(ranks: RankPool, grid: str, name: str) -> None:
    where = Grid.parse(grid)
    for log in ranks.run(where.world, events, where, eager(name, where.pipe, 2)):
        sent = [event for event in log if event.startswith("send blocks")]
        first = sent[0].removeprefix("send ").split(".")[1]
        computed = [number for number, event in enumerate(log) if event.startswith("compute blocks")]
        # A block behind is on its way while the last computation of an earlier one is still to come.
        assert log.index(sent[0]) < computed[-1] and f"blocks.{first}." not in log[computed[-1]]
        assert len(sent) == len(set(sent))


@pytest.mark.parametrize(
    ("grid", "name", "changes"),
    rest_is_long(
        [
            ("data=2", "1f1b", {"zero": True}),
            ("data=2,z=2", "1f1b", {"rest": ShardingPolicy(weights="replicated")}),
            ("data=2,z=2", "1f1b", {"ways": 2, "recompute": True}),
            ("pipe=2,data=2", "zb-h1", {"zero": True}),
            ("pipe=2,data=2", "interleaved", {}),
            ("pipe=2,data=2", "chimera", {"zero": True}),
        ],
        [("data=2", "1f1b", {"zero": True}), ("pipe=2,data=2", "chimera", {"zero": True})],
    ),
    ids=str,
)
@pytest.mark.slow
def test_it_trains_as_the_serial_model_with_the_bytes_predicted(
    verified: Verified, grid: str, name: str, changes: dict[str, Any]
) -> None:
    where = Grid.parse(grid)
    schedule = eager(name, where.pipe, 2 * where.pipe)
    holds(
        verified(
            Experiment(model=OurModel(GPT), grid=where, batch=Batch(16, 12), steps=2, schedule=schedule, **changes)
        )
    )
