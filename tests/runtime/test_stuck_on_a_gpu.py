"""A stuck rank on a GPU, where waits are the stream's."""

from __future__ import annotations

import time

import pytest
import torch

from cubeloom import Grid
from cubeloom.comm import CommunicationError, Network, devices
from cubeloom.launch import RankPool
from cubeloom.launch.share_gpu import sharing
from cubeloom.models import build, config, cut_of
from cubeloom.parallel import Batch, initial_values
from cubeloom.pipeline import Action, generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.work import StepWork
from on_a_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
PATIENCE = 4.0


def _step_in_which_rank_1_hangs() -> None:
    network = Network(Grid(pipe=2), devices.current("cuda"), timeout=PATIENCE)
    with torch.device("meta"):
        model = build(config("gpt-tiny"))
    fill = initial_values(model, 0, torch.float32, network.device)
    pipeline = Pipeline(model, cut_of(model), network, Batch(4, 12), fill, generate("1f1b", 2, 4))
    tokens = torch.zeros(4, 12, dtype=torch.long, device=network.device)
    data = {"tokens": tokens, "targets": tokens}
    pipeline.step(data)
    forward = StepWork.forward

    def damaged(self: StepWork, action: Action, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if str(action) == "1F2":
            time.sleep(600)
        return forward(self, action, inputs)

    StepWork.forward = damaged  # type: ignore[method-assign]
    pipeline.step(data)


def test_a_rank_that_hangs_is_named_by_those_who_wait_for_it() -> None:
    with sharing(2, "cuda"), RankPool(2, "cuda") as pool, pytest.raises(CommunicationError) as caught:
        pool.run(2, _step_in_which_rank_1_hangs, timeout=200)
    words = [str(caught.value), *caught.value.__notes__]
    # Rank 1 gave back the gradients of two micro-batches, and rank 0 waits for the third.
    assert any(
        "rank 0, at 0B2, after 0F3: receive of " in each and "from rank 1: nothing for 4 s" in each for each in words
    )
    assert "rank 1 of 2 did not answer and was ended" in words
