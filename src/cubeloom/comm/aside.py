"""A process group of its own for what goes on beside training: measurements, checkpoints that a thread is writing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_LONG = timedelta(hours=1)  # a disk may be slow


class Aside:
    """All ranks, joined through their hosts: whatever the device does, these messages do not queue behind its own.

    For one thread of each rank: messages of two would be taken for each other's.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=_LONG)

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gave, on every rank."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def close(self) -> None:
        dist.destroy_process_group(self.group)
