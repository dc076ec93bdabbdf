"""A process group of its own for what goes on beside training: measurements, checkpoints that a thread is writing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from cubeloom.comm.failure import failed
from cubeloom.errors import UserError

T = TypeVar("T")

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
        try:
            dist.all_gather_object(found, mine, group=self.group)
        except RuntimeError as error:
            raise failed("gathering from all ranks", error) from error
        return found

    def alike(self, mine: bytes) -> bool:
        """Whether all ranks gave the same bytes, of which all must give as many. Quicker than `gather`."""
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        try:
            dist.all_gather(found, own, group=self.group)
        except RuntimeError as error:
            raise failed("comparing with all ranks", error) from error
        return all(torch.equal(own, each) for each in found)

    def agree(self, work: Callable[[], T]) -> T:
        """What this rank's work gives, once all have done theirs; where one is refused, all are."""
        found, failure = None, None
        try:
            found = work()
        except UserError as error:
            failure = error
        for each in self.gather(failure):
            if each is not None:
                raise each
        return cast(T, found)

    def assign(self, mine: Any, rule: Callable[[Sequence[Any]], Sequence[T]]) -> T:
        """Rank 0 sees what each rank gave, and says what each gets: for lists that are too long for all to have all."""
        first = dist.get_rank(self.group) == 0
        of_all: list[Any] | None = [None] * dist.get_world_size(self.group) if first else None
        answer: list[Any] = [None]
        try:
            dist.gather_object(mine, of_all, group=self.group, group_dst=0)
            answers = None if of_all is None else list(rule(of_all))
            dist.scatter_object_list(answer, answers, group=self.group, group_src=0)
        except RuntimeError as error:
            raise failed("sharing out work among all ranks", error) from error
        return cast(T, answer[0])

    def close(self) -> None:
        dist.destroy_process_group(self.group)
