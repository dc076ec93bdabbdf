"""Jobs drawn at random: model, grid, schedule, micro-batches, policy, optimizer, strands, recomputation and dtypes."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from cubeloom import Grid
from cubeloom.base.errors import UserError
from cubeloom.base.grid import AXES, grids
from cubeloom.models import BERTConfig, GPTConfig, LlamaConfig, OurModel, ResNetConfig, UNetConfig
from cubeloom.models.configs import Config
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.parallel.config import WEIGHTS
from cubeloom.pipeline import Schedule, generate
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.pipeline.schedules import FAMILIES
from cubeloom.tools.verify import Experiment

SIZES: dict[str, Any] = {"vocab": 96, "positions": 16, "hidden": 48, "heads": 24}
MODELS: dict[str, Config] = {
    "gpt": GPTConfig(**SIZES, layers=6),
    "llama": LlamaConfig(**SIZES, layers=6, kv_heads=12, mlp_hidden=96),
    "bert": BERTConfig(**SIZES, layers=4),
    "unet": UNetConfig(
        image=8, channels=48, multipliers=(1, 2), attention=(False, True), res_blocks=1, head_dim=4, groups=12, turns=8
    ),
    "resnet": ResNetConfig(blocks=(2, 1), classes=24, image=8, width=24, small_images=True),
}
SCHEDULES = [name for name in FAMILIES if name != "auto"]  # it searches for seconds


def drawn(number: int) -> tuple[str, Experiment]:
    """The job of this number, with words that say what it is. Drawn again until it can run."""
    draw = Random(number)
    while True:
        try:
            words, experiment = _one(draw)
            experiment.specs()
        except UserError:  # sizes that do not divide, a schedule's rule
            continue
        return words, experiment


def _one(draw: Random) -> tuple[str, Experiment]:
    kind = draw.choice(list(MODELS))
    grid = draw.choice(list(grids(draw.choice((2, 4, 6, 8)), AXES)))
    ways = draw.choice((1, 1, 2))
    name, schedule = _schedule(draw, grid)
    rest = ShardingPolicy(
        activations=draw.choice(("sharded", "replicated")),
        weights=draw.choice(WEIGHTS),
        inputs=draw.choice(("kept", "regathered")),
        gradients=draw.choice(("float32", "model")),
    )
    dtype = draw.choice((torch.float64, torch.float32, torch.bfloat16))
    parts = 1 if schedule is None else len(portions(schedule))
    share = parts * ways * draw.choice((1, 2))
    experiment = Experiment(
        model=OurModel(MODELS[kind]),
        grid=grid,
        batch=Batch(share * grid.data * grid.z, 1 if kind in ("unet", "resnet") else 12),
        rest=rest,
        steps=2,
        dtype=dtype,
        zero=draw.choice((False, True)),
        schedule=schedule,
        ways=ways,
        recompute=draw.choice((False, False, True) if schedule is None else (False, True, "attention")),
    )
    said = (kind, str(grid).replace(" ", ""), name, f"ways{ways}", rest.activations, rest.weights, rest.inputs)
    return "-".join((*said, str(experiment.recompute), str(dtype).removeprefix("torch."))), experiment


def _schedule(draw: Random, grid: Grid) -> tuple[str, Schedule | None]:
    if grid.pipe == 1:
        return "none", None
    name = draw.choice(SCHEDULES)
    microbatches = grid.pipe * draw.choice((1, 2))
    return f"{name}x{microbatches}", generate(name, grid.pipe, microbatches)
