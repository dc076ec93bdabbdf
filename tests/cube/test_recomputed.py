"""Blocks that are computed once more in the backward: the same gradients to the last digit, and the bytes predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import BERTConfig, Config, GPTConfig, LlamaConfig, OurModel, build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, apply, initial_values, weave
from cubeloom.parallel.layers.linear import CubeLinear
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.recomputed import blocks_of, recompute_blocks
from cubeloom.parallel.resolution import specs_of
from cubeloom.parallel.specs import Budget
from cubeloom.parallel.weave import Weave
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.tools.rehearse.memory import Tracker
from cubeloom.tools.verify import Experiment
from parity import holds
from serial_runs import Verified

SMALL: dict[str, Any] = {"vocab": 96, "positions": 16, "hidden": 32, "layers": 3, "heads": 4}
GPT = GPTConfig(**SMALL, dropout=0.1)
LLAMA = LlamaConfig(**SMALL, kv_heads=4, mlp_hidden=64)
BERT = BERTConfig(**SMALL)


def trained(
    grid: Grid, config: Config, recompute: bool, rest: ShardingPolicy
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The gradients of the second backward, and the origins of what was communicated in it."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(config)
    specs = specs_of(model, cut_of(model))
    batch = Batch(8, 12)
    state = apply(model, cut_of(model), network, batch, initial_values(model, 0, torch.float64), rest)
    if recompute:
        recompute_blocks(model, blocks_of(model, specs), specs)
    tokens = torch.arange(batch.samples * batch.sequence).view(batch.samples, -1) * 7 % 96
    mine = tokens[grid.share(network.coordinates, batch.samples)]
    for step in range(2):
        model.zero_grad()
        state.clock.step = step
        loss = Weave(model, 2, state.staggers)(mine, mine.roll(-1, 1))
        with network.recording() as ledger:
            loss.backward()
    found = {name: local_of(each.grad).clone() for name, each in model.named_parameters() if each.grad is not None}
    return found, [entry.origin for entry in ledger.entries]


def differ(grid: Grid, config: Config, rest: ShardingPolicy) -> tuple[list[str], list[str], list[str]]:
    """Parameters whose gradients are not the same bits; what is communicated in the backward, plain and recomputed."""
    plain, before = trained(grid, config, False, rest)
    again, behind = trained(grid, config, True, rest)
    assert plain.keys() == again.keys()
    return [name for name in plain if not torch.equal(plain[name], again[name])], before, behind


@pytest.mark.parametrize(
    ("grid", "config"), [("x=2,y=2", GPT), pytest.param("y=2,z=2", LLAMA, marks=pytest.mark.slow)], ids=["gpt", "llama"]
)
def test_gradients_are_the_same_bits_with_dropout_and_strands(ranks: RankPool, grid: str, config: Config) -> None:
    for different, plain, again in ranks.run(4, differ, Grid.parse(grid), config, ShardingPolicy()):
        assert different == []
        # The result of the last linear is not summed once more, unless dropout comes behind.
        assert len(again) > len(plain)
        assert any("mlp.down output forward" in origin for origin in again) == (config is GPT)


def test_weights_are_gathered_ahead_and_once_for_both_passes(ranks: RankPool) -> None:
    """The first of the next block behind the last of this one, and within a block one after the other."""
    config = replace(GPT, dropout=0.0)
    for different, plain, again in ranks.run(2, differ, Grid(z=2), config, ShardingPolicy()):
        assert different == []
        gathers = [
            origin for origin in again if " weight " in origin and "blocks" in origin and "gradient" not in origin
        ]
        assert len(gathers) == len(
            [each for each in plain if " weight " in each and "blocks" in each and "gradient" not in each]
        )
        order = [
            (block, layer) for block in (2, 1, 0) for layer in ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")
        ]
        assert [origin.split(" ")[0] for origin in gathers] == [f"blocks.{block}.{layer}" for block, layer in order]
        # One is under way while the layer before is computed.
        started = {origin.split(" ")[0]: again.index(origin) for origin in gathers}
        assert all(started[one] < started[other] for one, other in pairwise([each.split(" ")[0] for each in gathers]))
        assert started["blocks.1.attention.qkv"] < again.index("blocks.2.attention.qkv weight gradient")


@pytest.mark.parametrize(
    ("grid", "model", "changes"),
    [
        ("x=2,y=2", BERT, {"rest": ShardingPolicy(activations="replicated")}),
        ("z=2", LLAMA, {"ways": 2, "rest": ShardingPolicy(weights="kept")}),
        ("y=2,z=2", GPT, {"zero": True, "rest": ShardingPolicy(inputs="regathered")}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_it_trains_as_the_serial_model_with_the_bytes_predicted(
    verified: Verified, grid: str, model: Config, changes: dict[str, Any]
) -> None:
    where = Grid.parse(grid)
    holds(
        verified(Experiment(model=OurModel(model), grid=where, batch=Batch(8, 12), steps=2, recompute=True, **changes))
    )


def saved(budget: int | bool) -> tuple[int, list[str]]:
    """Bytes that are kept from a forward to its backward, and the products of the backward's recomputation."""
    network = Network(Grid())
    with torch.device("meta"):
        model = build(LLAMA)
    fill = initial_values(model, 0, torch.float64, network.device)
    recompute = budget if isinstance(budget, bool) else Budget(budget)
    pipeline = Pipeline(model, cut_of(model), network, Batch(8, 12), fill, generate("1f1b", 1, 1), recompute=recompute)
    computed: list[str] = []
    plain = CubeLinear.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = plain(self, x)
        if weave.replaying():
            computed.append(self._name)
        return y

    tokens = torch.arange(96).view(8, 12)
    with patch.object(CubeLinear, "forward", forward), Tracker() as tracker:
        pipeline.step({"tokens": tokens, "targets": tokens})
        tracker.begin()
        pipeline.step({"tokens": tokens, "targets": tokens})
    return tracker.memory().at_peak["activations"], computed


def test_a_budget_keeps_the_results_that_take_longest_for_their_bytes(ranks: RankPool) -> None:
    """Of one block the gates take 8 · 12 · 128 numbers; of a linear the inputs say how long a number takes, alike here."""
    (everything, _), (nothing, again), (some, _), (all_of_them, _) = (
        ranks.run(1, saved, budget)[0] for budget in (False, True, 3 * 96 * (96 + 32) * 8, 10**9)
    )
    assert nothing < some < all_of_them < everything
    assert {name.split(".", 2)[2] for name in again} == {"attention.qkv", "attention.proj", "mlp.gate_up"}


@pytest.mark.parametrize(
    ("grid", "name", "changes"),
    [
        ("x=2,y=2", "1f1b", {}),
        ("pipe=2,z=2", "chimera", {"ways": 2}),
        pytest.param("y=2,z=2", "1f1b", {"rest": ShardingPolicy(inputs="regathered")}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_budget_trains_as_the_serial_model_with_the_bytes_predicted(
    verified: Verified, grid: str, name: str, changes: dict[str, Any]
) -> None:
    where = Grid.parse(grid)
    schedule = generate(name, where.pipe, 2)
    budget = Budget(40_000)
    holds(
        verified(
            Experiment(
                model=OurModel(GPT),
                grid=where,
                batch=Batch(8, 12),
                steps=2,
                schedule=schedule,
                recompute=budget,
                **changes,
            )
        )
    )
