"""PipeDream and PipeDream-2BW: weights as stale as their definitions say, and no staler; versions as few as they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, LlamaConfig, OurModel, build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, initial_values
from cubeloom.pipeline import Schedule, generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.versions import Versions
from cubeloom.tools.verify import Experiment
from grids import rest_is_long
from serial_runs import Verified

pytestmark = pytest.mark.timeout(180)

SMALL: dict[str, Any] = {"vocab": 96, "positions": 16, "hidden": 32, "layers": 3, "heads": 4}
TIED = GPTConfig(**SMALL)
UNTIED = LlamaConfig(**SMALL, kv_heads=4, mlp_hidden=64, tied=False)


def stale_as_defined(verified: Verified, grid: Grid, schedule: Schedule, **changes: Any) -> None:
    model = TIED if schedule.name == "pipedream-2bw" else UNTIED
    batch = Batch(schedule.microbatches * grid.data * grid.z, 12)
    report = verified(Experiment(model=OurModel(model), grid=grid, batch=batch, schedule=schedule, steps=2, **changes))
    assert report.loss_diff <= 1e-10
    assert report.weight_diff <= 1e-10
    assert report.bytes_agree, (report.counted, report.predicted)
    assert report.replicas_agree


@pytest.mark.parametrize(
    "grid",
    rest_is_long(["pipe=2", "pipe=4", "pipe=2,data=2", "pipe=2,x=2"], ["pipe=4", "pipe=2,data=2", "pipe=2,x=2"]),
)
def test_two_buffered_weights(verified: Verified, grid: str) -> None:
    on = Grid.parse(grid)
    stale_as_defined(verified, on, generate("pipedream-2bw", on.pipe, 3 * on.pipe))


@pytest.mark.parametrize("grid", rest_is_long(["pipe=2", "pipe=4"], ["pipe=4"]))
def test_an_update_after_every_microbatch(verified: Verified, grid: str) -> None:
    on = Grid.parse(grid)
    stale_as_defined(verified, on, generate("pipedream", on.pipe, 6))


def test_with_recomputation_and_a_sharded_optimizer(verified: Verified) -> None:
    stale_as_defined(verified, Grid(pipe=2), generate("pipedream-2bw", 2, 6), recompute=True)
    stale_as_defined(verified, Grid(pipe=2, data=2), generate("pipedream-2bw", 2, 6), zero=True)


def test_weights_kept_along_z_are_gathered_again_when_their_version_changes(verified: Verified) -> None:
    stale_as_defined(verified, Grid(pipe=2, z=2), generate("pipedream-2bw", 2, 6), rest=ShardingPolicy(weights="kept"))


def test_a_stage_keeps_as_many_versions_as_its_schedule_promises() -> None:
    """2BW: two. PipeDream: as many as there are stages from here to the end."""
    assert _most_versions("pipedream-2bw", 4, 16) == [2, 2, 2, 2]
    assert _most_versions("pipedream", 4, 16) == [4, 3, 2, 1]


def _most_versions(name: str, stages: int, microbatches: int) -> list[int]:
    from cubeloom.pipeline import Kind
    from cubeloom.pipeline.memory import versions

    schedule = generate(name, stages, microbatches)
    most = []
    for worker, row in enumerate(schedule.workers):
        used = {microbatch: version for (_, _, microbatch), version in versions(schedule, worker).items()}
        kept = Versions([], used)
        seen = 1
        for action in row:
            if action.kind is Kind.FORWARD:
                with kept.of(action.microbatch):
                    pass
            elif action.kind is Kind.BACKWARD:
                kept.backward_done(action.microbatch)
            else:
                kept.update(lambda: None)
            seen = max(seen, 1 + len(kept._old))
        most.append(seen)
    return most


def test_a_step_needs_an_update_exactly_if_the_schedule_has_some(ranks: RankPool) -> None:
    ranks.run(2, _refuses_the_wrong_step)


def _refuses_the_wrong_step() -> None:
    with torch.device("meta"):
        model = build(UNTIED)
    network = Network(Grid(pipe=2))
    fill = initial_values(model, 0, torch.float64, network.device)
    for name, update in (("pipedream", None), ("1f1b", lambda: None)):
        pipeline = Pipeline(model, cut_of(model), network, Batch(4, 12), fill, generate(name, 2, 4))
        with pytest.raises(UserError, match=r"updates weights (after|within) a step"):
            pipeline.step({"tokens": torch.zeros(4, 12, dtype=torch.long)}, update=update)


def test_comparisons_that_would_not_be_fair_are_refused() -> None:
    tied = Experiment(model=OurModel(TIED), grid=Grid(pipe=2), batch=Batch(4, 12), schedule=generate("pipedream", 2, 4))
    with pytest.raises(UserError, match="ties no weights"):
        tied.specs()
