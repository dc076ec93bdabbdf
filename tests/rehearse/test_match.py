"""Ranks that do not fit together are found, with words that say who, what and for which layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from cubeloom import Grid
from cubeloom.comm import Axis, Pending
from cubeloom.comm.recording_backend import Call, Group, Wait
from cubeloom.pipeline.messages import Message
from cubeloom.pipeline.runtime.channels import Channels
from cubeloom.tools.rehearse import rehearse
from cubeloom.tools.rehearse.match import match, misnamed
from cubeloom.tools.rehearse.roles import Line, Roles, line_of
from cubeloom.tools.verify import Experiment

from .jobs import BERT, JOBS, TURNING, job

PAIR = Group((0, 1))
SUM = Call("all_reduce", PAIR, 800, "float64", "sum", origin="loss")


def sent(size: int = 8, operation: str = "send", peer: int = 1) -> Call:
    return Call(operation, PAIR, size, "float64", peer=peer, origin="0F0")


def two_ranks(first: Iterable[Call | Wait], second: Iterable[Call | Wait]) -> list[str]:
    return match({0: list(first), 1: list(second)}, Roles(job("pipe=2", "1f1b")))


def awaited(*calls: Call) -> list[Call | Wait]:
    return [event for number, call in enumerate(calls) for event in (call, Wait(2 * number))]


def test_programs_that_fit() -> None:
    other = replace(SUM, size=16, origin="counts")
    assert two_ranks(awaited(SUM, other), awaited(SUM, other)) == []
    assert two_ranks([SUM, other, Wait(1), Wait(0)], [SUM, other, Wait(0), Wait(1)]) == []
    assert two_ranks(awaited(sent()), awaited(sent(operation="receive", peer=0))) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operation": "all_gather", "how": ""}, "rank 1 has all_gather of 800 bytes"),
        ({"size": 808}, "rank 1 has all_reduce (sum) of 808 bytes"),
        ({"dtype": "float32"}, "bytes float32 for loss"),
        ({"how": "max"}, "all_reduce (max)"),
    ],
)
def test_members_that_disagree(change: dict[str, Any], words: str) -> None:
    (problem,) = two_ranks(awaited(SUM), awaited(replace(SUM, **change)))
    assert words in problem
    assert "rank 0 has all_reduce (sum) of 800 bytes float64 for loss" in problem


def test_another_order_within_a_group() -> None:
    other = replace(SUM, size=16, origin="counts")
    problems = two_ranks([SUM, other, Wait(0), Wait(1)], [other, SUM, Wait(0), Wait(1)])
    assert len(problems) == 1
    assert "communication 0 of ranks 0, 1" in problems[0]
    assert "for counts" in problems[0]


def test_a_message_of_another_size() -> None:
    (problem,) = two_ranks(awaited(sent()), awaited(sent(16, "receive", peer=0)))
    assert "communication 0 between ranks 0, 1" in problem
    assert "receive of 16 bytes" in problem


def test_a_send_that_nobody_receives() -> None:
    assert "deadlock: rank 0 waits for send of 8 bytes float64 for 0F0" in two_ranks(awaited(sent()), [])[0]
    (problem,) = two_ranks([sent()], [])  # nobody waits for it either
    assert "rank 0 starts send" in problem
    assert "rank 1 never does" in problem


def test_two_groups_in_opposite_orders_are_a_deadlock() -> None:
    other = replace(SUM, group=Group((0, 1), copy=1), origin="gradients")
    problems = two_ranks(awaited(SUM, other), awaited(other, SUM))
    assert len(problems) == 2
    assert "deadlock: rank 0 waits for all_reduce (sum) of 800 bytes float64 for loss" in problems[0]
    assert "rank 1 waits for all_reduce (sum) of 800 bytes float64 for gradients" in problems[1]
    assert "which rank 0 never starts" in problems[1]


def test_messages_that_wait_for_each_other() -> None:
    there, back = sent(), sent(operation="send", peer=0)
    arriving, coming = sent(operation="receive", peer=0), sent(operation="receive", peer=1)
    assert len(two_ranks(awaited(there, coming), awaited(back, arriving))) == 2
    assert two_ranks(awaited(there, coming), awaited(arriving, back)) == []


def test_splits_that_do_not_add_up() -> None:
    plane = Group((0, 1))
    calls = [
        Call("all_to_all", plane, 0, "float64", splits=splits, origin="turn")
        for splits in (((2, 3), (2, 4)), ((4, 1), (2, 1)))
    ]
    programs = {rank: awaited(call) for rank, call in enumerate(calls)}
    (problem,) = match(programs, Roles(job("x=2", model=BERT)))
    assert "rank 0 sends 3 elements to rank 1, which expects 2" in problem


def test_groups_made_in_different_orders() -> None:
    assert misnamed({0: {"7": (0, 1)}, 1: {"7": (0, 1), "8": (1, 3)}}) == []
    (problem,) = misnamed({0: {"7": (0, 1)}, 2: {"7": (2, 3)}})
    assert "rank 0 made the group of ranks 0, 1 where rank 2 made that of ranks 2, 3" in problem


@pytest.mark.parametrize("placement", [("pipe", "data", "z", "y", "x"), ("x", "data", "pipe", "y", "z")])
def test_groups_of_one_rank_tell_those_of_all_others(placement: tuple[str, ...]) -> None:
    grid = Grid(pipe=2, data=3, z=2, x=2, placement=placement)
    for axes in (("data",), ("z", "x"), ("data", "z", "x")):
        seen = {line_of(grid, rank, Group(tuple(grid.line(rank, axes)))) for rank in range(grid.world)}
        assert {line.axes for line in seen} == {tuple(axis for axis in ("data", "z", "x") if axis in axes)}
        for line in seen:
            members = line.ranks(grid, grid.rank({"pipe": line.places[0]}))
            assert all(line.ranks(grid, member) == members for member in members)
    with pytest.raises(ValueError, match="no line of the grid"):
        line_of(grid, 0, Group((0, 1, 2, 4)))
    assert Line(("data",), (0, 1)).ranks(Grid(pipe=2, data=2, x=2), 1) == (1, 3, 5, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment", [job("pipe=2,x=2", "chimera", steps=1), replace(JOBS["bert"], steps=1)], ids=["chimera", "bert"]
)
def test_all_ranks_of_a_role_run_one_program(experiment: Experiment) -> None:
    """All are run here, so that none stands for another."""
    whole = rehearse(experiment, range(experiment.grid.world))
    assert whole.problems == ()
    assert [run.rank for run in whole.runs] == list(range(experiment.grid.world))


def faulty(experiment: Experiment) -> list[str]:
    return list(rehearse(replace(experiment, steps=1)).problems)


# The job of 64 ranks in which faults are planted.
SIXTY_FOUR = job("pipe=2,data=4,z=2,y=2,x=2", "chimera")


def test_a_message_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send: Callable[[Channels, Message, dict[str, Tensor]], None] = Channels.send

    def forgetful(self: Channels, message: Message, tensors: dict[str, Tensor]) -> None:
        if (message.source, message.target) != (0, 1):
            send(self, message, tensors)

    monkeypatch.setattr(Channels, "send", forgetful)
    problems = faulty(SIXTY_FOUR)
    assert any("deadlock: rank 32 waits for receive of" in each and "rank 0 never starts" in each for each in problems)


def test_gradients_of_another_dtype_on_one_worker_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce: Callable[..., Pending] = Axis.all_reduce_in_place

    def narrow(self: Axis, tensor: Tensor, origin: str = "", *, largest: bool = False) -> Pending:
        if origin == "gradients" and self._ranks[self.index] >= 32:
            tensor = tensor.float()
        return reduce(self, tensor, origin, largest=largest)

    monkeypatch.setattr(Axis, "all_reduce_in_place", narrow)
    problems = faulty(SIXTY_FOUR)
    assert problems
    assert all("float32 for gradients" in each for each in problems)
    assert "rank 0 has all_reduce (sum)" in problems[0]
    assert "rank 32 has all_reduce (sum)" in problems[0]


def test_a_layer_that_one_rank_of_the_plane_computes_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for nobody else: its neighbours are run as well."""
    exchange: Callable[..., Pending] = Axis.all_to_all

    def greedy(self: Axis, parts: list[Tensor], sizes: list[int], origin: str = "") -> Pending:
        if self.index == 1:
            parts = [part.repeat(2) for part in parts]
        return exchange(self, parts, sizes, origin)

    monkeypatch.setattr(Axis, "all_to_all", greedy)
    assert "for transform turn forward rank" in faulty(job("data=2,y=3", model=TURNING))[0]
