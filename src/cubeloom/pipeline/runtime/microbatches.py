"""Cuts a rank's samples into the portions that the schedule's actions name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from cubeloom.comm import Network
from cubeloom.comm.batch import part_of
from cubeloom.parallel.layers.edges import CubeSquaredLoss
from cubeloom.parallel.layers.loss import CubeCrossEntropy
from cubeloom.parallel.traced.loss import share_name
from cubeloom.pipeline import Schedule
from cubeloom.pipeline.runtime.stage import Data, Portion

PORTION = "portion"
"""The name of a portion's share in its group, for losses that are means over samples."""


def portions(schedule: Schedule) -> list[Portion]:
    """Micro-batches, or their halves if the schedule halves them, in the order of the samples."""
    parts: tuple[int | None, ...] = (0, 1) if schedule.halved else (None,)
    return [(microbatch, part) for microbatch in range(schedule.microbatches) for part in parts]


def cut_up(data: Mapping[str, Tensor], into: list[Portion]) -> dict[Portion, Data]:
    """Cuts tensors by their first dimension. Scalars and other values go to every portion."""
    chunks = {
        name: each.chunk(len(into)) if isinstance(each, Tensor) and each.dim() else [each] * len(into)
        for name, each in ((name, part_of(value)) for name, value in data.items())
    }
    return {portion: {name: parts[place] for name, parts in chunks.items()} for place, portion in enumerate(into)}


def counted_shares(
    data: Mapping[Portion, Data],
    groups: Sequence[int],
    count: Callable[[Data], Tensor | None],
    network: Network,
) -> dict[Portion, dict[str, Tensor]]:
    """As `shares`, for losses between the layers of a model. `count` returns the targets of each loss of a portion.

    The loss of a portion, which may be a sum of several, counts as much as any other of its group. A cross-entropy in
    it is weighted by its number of targets.
    """
    sizes = Counter(groups[microbatch] for microbatch, _ in data)
    portion = {
        group: torch.tensor(1 / size, dtype=torch.float64, device=network.device) for group, size in sizes.items()
    }
    found = {each: {PORTION: portion[groups[each[0]]]} for each in data}
    counts = [count(each) for each in data.values()]
    known = [each for each in counts if each is not None]
    if not known:
        return found
    mine = network.axis("data", "z").all_reduce(torch.stack(known), "loss counts").wait()
    of_group: dict[int, list[int]] = {}
    for place, (microbatch, _) in enumerate(data):
        of_group.setdefault(groups[microbatch], []).append(place)
    for place, (each, shares) in enumerate(found.items()):
        group = groups[each[0]]
        total = mine[of_group[group]].sum(0)
        for loss, share in enumerate((mine[place] / total * sizes[group]).unbind()):
            shares[share_name(loss)] = share
    return found


def shares(
    data: Mapping[Portion, Data],
    groups: Sequence[int],
    losses: Mapping[str, str],
    layers: Mapping[str, CubeCrossEntropy | CubeSquaredLoss],
    network: Network,
) -> dict[Portion, dict[str, Tensor]]:
    """The share of each portion's mean loss in the mean of its group: proportional to its targets that count.

    `losses`: which of the data are the targets of each loss; `groups`: the group of each micro-batch. The shares stay
    on the device, so that the host does not wait.
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
