"""A rank's samples cut into the portions that the schedule's actions name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cubeloom.comm import Network
from cubeloom.parallel.layers.edges import CubeSquaredLoss
from cubeloom.parallel.layers.loss import CubeCrossEntropy
from cubeloom.pipeline import Schedule
from cubeloom.pipeline.runtime.stage import Data, Portion


def portions(schedule: Schedule) -> list[Portion]:
    """Micro-batches, or their halves where the schedule halves them, in the order of the samples."""
    parts: tuple[int | None, ...] = (0, 1) if schedule.halved else (None,)
    return [(microbatch, part) for microbatch in range(schedule.microbatches) for part in parts]


def cut_up(data: Mapping[str, Tensor], into: list[Portion]) -> dict[Portion, Data]:
    chunks = {name: tensor.chunk(len(into)) for name, tensor in data.items()}
    return {portion: {name: parts[place] for name, parts in chunks.items()} for place, portion in enumerate(into)}


def shares(
    data: Mapping[Portion, Data],
    groups: Sequence[int],
    losses: Mapping[str, str],
    layers: Mapping[str, CubeCrossEntropy | CubeSquaredLoss],
    network: Network,
) -> dict[Portion, dict[str, Tensor]]:
    """What part each portion's mean loss has in the mean of its group: as many as it has targets that count.

    `losses` says which of the data each loss has its targets from; `groups` the group of each micro-batch. Numbers stay on
    the device, so that nobody waits for it.
    """
    found: dict[Portion, dict[str, Tensor]] = {portion: {} for portion in data}
    for name, key in losses.items():
        if any(key not in each for each in data.values()):
            continue
        mine = torch.stack([layers[name].count(each[key]) for each in data.values()])
        counts = network.axis("data", "z").all_reduce(mine, f"{name} counts").wait().unbind()
        totals: dict[int, Tensor] = {}
        for (microbatch, _), count in zip(data, counts, strict=True):
            group = groups[microbatch]
            totals[group] = totals[group] + count if group in totals else count
        for portion, count in zip(data, counts, strict=True):
            found[portion][name] = count / totals[groups[portion[0]]]
    return found
