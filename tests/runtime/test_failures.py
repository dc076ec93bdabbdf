"""A rank that fails, dies or hangs in the middle of a step ends the job in the time that was set, and the words say where."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankFailed, RankPool
from cubeloom.models import LlamaConfig, build, cut_of
from cubeloom.parallel import Batch, initial_values
from cubeloom.pipeline import Action, generate
from cubeloom.pipeline.runtime import Pipeline, PipelineError
from cubeloom.pipeline.runtime.work import StepWork

pytestmark = pytest.mark.timeout(60)

MODEL = LlamaConfig(vocab=96, positions=16, hidden=32, layers=2, heads=4, kv_heads=4, mlp_hidden=64)
PATIENCE = 2.0


def _step_in_which_rank_1(does: str) -> None:
    """One step of 1F1B on four ranks, where rank 1 fails instead of its third forward."""
    network = Network(Grid(pipe=4), timeout=PATIENCE)
    with torch.device("meta"):
        model = build(MODEL)
    fill = initial_values(model, 0, torch.float64, network.device)
    pipeline = Pipeline(model, cut_of(model), network, Batch(8, 12), fill, generate("1f1b", 4, 8))
    tokens = torch.zeros(8, 12, dtype=torch.long)
    data = {"tokens": tokens, "targets": tokens}
    pipeline.learn(data)
    forward = StepWork.forward

    def damaged(self: StepWork, action: Action, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if str(action) == "1F2":
            match does:
                case "hangs":
                    time.sleep(600)
                case "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "fails":
                    raise RuntimeError("the matrix is singular")
        return forward(self, action, inputs)

    StepWork.forward = damaged  # type: ignore[method-assign]
    try:
        pipeline.step(data)
    finally:
        StepWork.forward = forward  # type: ignore[method-assign]


def test_a_rank_that_hangs_is_named_by_those_who_wait_for_it(ranks: RankPool) -> None:
    with pytest.raises(PipelineError) as caught:
        ranks.run(4, _step_in_which_rank_1, "hangs", timeout=40)
    words = [str(caught.value), *caught.value.__notes__]
    # Rank 2 did what it had, and waits for the third micro-batch of rank 1.
    assert any("rank 2, worker 2, at 2F2, after 2B0: receive of output 1F2 from rank 1: " in each for each in words)
    assert "rank 1 of 4 did not answer and was ended" in words


def test_a_rank_that_dies_is_named_first(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 4 died with exit code -9"):
        ranks.run(4, _step_in_which_rank_1, "dies", timeout=40)


def test_a_rank_that_fails_says_where(ranks: RankPool) -> None:
    with pytest.raises(PipelineError, match="rank 1, worker 1, at 1F2, after 1F1: the matrix is singular"):
        ranks.run(4, _step_in_which_rank_1, "fails", timeout=40)


def test_the_next_job_runs(ranks: RankPool) -> None:
    ranks.run(4, _step_in_which_rank_1, "as it should", timeout=40)
