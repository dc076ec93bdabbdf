"""Small jobs to rehearse."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from cubeloom import Grid
from cubeloom.models import BERTConfig, Config, GPTConfig, LlamaConfig, OurModel
from cubeloom.parallel import Batch, ParallelConfig, ShardingPolicy, step_volume
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.tools.verify import Experiment

SMALL: dict[str, Any] = {"vocab": 96, "positions": 16, "hidden": 32, "heads": 8}
GPT = GPTConfig(**SMALL, layers=2)
LLAMA = LlamaConfig(**SMALL, layers=2, kv_heads=8, mlp_hidden=64)
COPIED = replace(LLAMA, layers=2, kv_heads=2)  # on y=4 ranks have copies of keys and values
BERT = BERTConfig(**SMALL, layers=2)


def job(
    grid: str, schedule: str | None = None, model: Config = GPT, microbatches: int | None = None, **rest: Any
) -> Experiment:
    """Two steps of two samples for each rank of data and z and strand, or of as many micro-batches as workers."""
    on = Grid.parse(grid)
    made = None if schedule is None else generate(schedule, on.pipe, microbatches or on.pipe)
    share = (2 if made is None else len(portions(made))) * int(rest.get("ways", 1))
    return Experiment(
        model=OurModel(model), grid=on, batch=Batch(share * on.data * on.z, 12), schedule=made, **{"steps": 2, **rest}
    )


def closed_form(experiment: Experiment, rank: int) -> dict[str, Fraction]:
    """Bytes that a rank receives in one step."""
    here = experiment.grid.coordinates(rank)
    config = ParallelConfig.exact(experiment.grid, experiment.rest, experiment.batch, experiment.dtype.itemsize, here)
    if experiment.schedule is None:
        return step_volume(experiment.specs(), config, experiment.zero)
    return experiment.layout(experiment.schedule).volume(config, here["pipe"], experiment.zero, experiment.recompute)


KEPT = ShardingPolicy(activations="replicated", weights="kept")
REGATHERED = ShardingPolicy(inputs="regathered", weights="replicated")

# BERT's last layer turns features in the plane, so that its ranks differ.
TURNING = replace(BERT, hidden=96, heads=24, layers=1)

# One of each kind.
JOBS = {
    "cube": job("z=2,y=2,x=2"),
    "woven": job("y=2,x=2", ways=2),
    "woven-along-z": job("z=2", model=replace(GPT, layers=1), rest=KEPT, ways=2),
    "zero": job("data=4,y=2", zero=True),
    "rounded": job("pipe=2,data=2", "chimera", zero=True, moments="bfloat16"),
    "alone": job("y=2", dtype=torch.bfloat16, fp32_master_weights=False, moments="bfloat16"),
    "hosted": job("data=2,y=2", dtype=torch.bfloat16, zero=True, offload=True),
    "kept": job("data=2,z=2,x=2", rest=KEPT),
    "bert": job("y=2,x=2", model=TURNING),
    "next-sentence": job("y=2,x=2", model=replace(BERT, next_sentence=True)),
    "chimera": job("pipe=4,data=2", "chimera"),
    "chimera-woven-zero": job("pipe=2,data=2", "chimera", ways=2, zero=True),
    "1f1b": job("pipe=2,z=2,x=2", "1f1b"),
    "split-backward": job("pipe=2,data=2", "zb-h1"),
    "padded": job("y=2,z=2", model=replace(GPT, vocab=95)),
    "copied": job("y=4,z=2", model=COPIED),
    "copied-zero": job("pipe=2,data=2,y=4", "chimera", model=COPIED, zero=True),
    "asynchronous": job("pipe=2,data=2", "pipedream-2bw", model=LLAMA),
}
