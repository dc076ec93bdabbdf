"""A separate CPU (gloo) process group for communication beside training: measurements, checkpoints written by a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from cubeloom.base.errors import UserError
from cubeloom.base.host import name_of_rank
from cubeloom.comm.failure import CommunicationError, failed

T = TypeVar("T")

_LONG = timedelta(hours=1)  # a disk can be slow


def check_process_group(sizes: str) -> None:
    """`sizes` of the axes, for the error."""
    if not dist.is_initialized():
        raise UserError(
            f"torch.distributed has no process group yet: `cubeloom.init({sizes})` makes one of the ranks that torchrun,"
            " srun or mpirun started and gives their Network; or call torch.distributed.init_process_group before"
        )


@dataclass(frozen=True)
class _Failed:
    rank: str
    refused: bool  # a restart would not help
    words: str


def _joint(failures: list[_Failed], world: int) -> UserError | CommunicationError:
    """One error for all ranks. If all ranks report the same, no rank is named."""
    first = next((each for each in failures if each.refused), failures[0])
    alone = len(failures) < world or len({each.words for each in failures}) > 1
    words = f"{first.rank}: {first.words}" if alone else first.words
    return UserError(words) if first.refused else CommunicationError(words)


class HostGroup:
    """All ranks, in a CPU (gloo) process group that is independent of NCCL's streams.

    For one thread per rank: messages of two threads would be confused. No wait for another rank lasts longer than
    `timeout` seconds.
    """

    def __init__(self, timeout: float | None = None) -> None:
        check_process_group("...")
        limit = _LONG if timeout is None else timedelta(seconds=timeout)
        self.group = dist.new_group(backend="gloo", timeout=limit)
        self.rank = dist.get_rank()
        self.name = name_of_rank(self.rank, dist.get_world_size())

    def gather(self, mine: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        try:
            dist.all_gather_object(found, mine, group=self.group)
        except RuntimeError as error:
            raise failed("gathering from all ranks", error) from error
        return found

    def alike(self, mine: bytes) -> bool:
        """Whether all ranks gave the same bytes. All must give the same number of bytes. Faster than `gather`."""
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        try:
            dist.all_gather(found, own, group=self.group)
        except RuntimeError as error:
            raise failed("comparing with all ranks", error) from error
        return all(torch.equal(own, each) for each in found)

    def agree(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks and return this rank's result. If one rank fails, all fail, and the error names it."""
        found, failure = None, None
        try:
            found = work()
        except Exception as error:
            failure = error
        told = None if failure is None else _Failed(self.name, isinstance(failure, UserError), str(failure))
        failures = [each for each in self.gather(told) if each is not None]
        if failure is not None and not isinstance(failure, UserError):
            raise failure
        if failures:
            raise _joint(failures, dist.get_world_size(self.group))
        return cast(T, found)

    def follow_first(self, work: Callable[[], T]) -> T:
        """The result of rank 0's work, on every rank. If rank 0 is refused, all are."""
        first = dist.get_rank(self.group) == 0
        mine = self.agree(lambda: work() if first else None)
        return cast(T, self.gather(mine)[0])

    def assign(self, mine: Any, rule: Callable[[Sequence[Any]], Sequence[T]]) -> T:
        """Rank 0 gets every rank's value and decides what each rank gets: for lists too long to send to all ranks."""
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
