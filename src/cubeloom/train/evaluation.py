"""The loss on validation data."""

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
    """The mean over all targets of all batches that count, and the number of these targets. Called by all ranks.

    `batches`: this rank's shares, named as in the model's forward; `targets`: the name of the targets, if there are
    any.
    """
    total, count = 0.0, 0
    for batch in batches:
        counted = _counted(batch, targets, network)
        loss = pipeline.evaluate(batch)
        if counted:  # otherwise there is no mean
            total, count = total + loss * counted, count + counted
    return (total / count if count else float("nan")), count


def _counted(batch: Mapping[str, Tensor], targets: str | None, network: Network) -> int:
    """The number of targets of the whole batch that count; of samples, if there are no targets."""
    mine = (batch[str(targets)] != IGNORED).sum() if targets in batch else torch.tensor(len(next(iter(batch.values()))))
    return int(network.axis("data", "z").all_reduce(mine.double().to(network.device), "targets").wait().item())
