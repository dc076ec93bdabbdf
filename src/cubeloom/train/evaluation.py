"""The loss on data that nobody trains on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cubeloom.comm import Network
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.train.data.stream import IGNORED


def mean_loss(
    pipeline: Pipeline, network: Network, batches: Iterable[Mapping[str, Tensor]], targets: str | None
) -> tuple[float, int]:
    """The mean over all targets of all batches that count, and how many those are; called by all ranks.

    `batches` are this rank's shares, as the model's forward names them; `targets` is what it calls its targets, if it has any.
    """
    total, count = 0.0, 0
    for batch in batches:
        counted = _counted(batch, targets, network)
        loss = pipeline.evaluate(batch)
        if counted:  # else there is no mean
            total, count = total + loss * counted, count + counted
    return (total / count if count else float("nan")), count


def _counted(batch: Mapping[str, Tensor], targets: str | None, network: Network) -> int:
    """Targets of the whole batch that count; its samples, where it has no targets."""
    mine = (batch[str(targets)] != IGNORED).sum() if targets in batch else torch.tensor(len(next(iter(batch.values()))))
    return int(network.axis("data", "z").all_reduce(mine.double().to(network.device), "targets").wait().item())
