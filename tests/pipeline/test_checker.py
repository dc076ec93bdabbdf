"""Every generator's schedules are accepted; every damage is found, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cubeloom import UserError
from cubeloom.pipeline import Action, Costs, Kind, Schedule, Sync, check, generate, problems, programme, synchronised
from cubeloom.pipeline.dependencies import needs
from cubeloom.pipeline.messages import Receive, Send, edges, stuck
from cubeloom.pipeline.receiving import receiving_early, receiving_in_time
from cubeloom.pipeline.schedule import Row
from pipeline.legal import SYNCHRONOUS, schedules


@settings(max_examples=120, deadline=None)
@given(schedules())
def test_every_generator_is_accepted(schedule: Schedule) -> None:
    assert problems(schedule) == []


@settings(max_examples=60, deadline=None)
@given(schedules(SYNCHRONOUS, most_stages=6), st.sampled_from(Sync))
def test_every_generator_is_accepted_with_its_reductions(schedule: Schedule, sync: Sync) -> None:
    reduced = synchronised(schedule, sync)
    assert problems(reduced) == []
    launched = [(action.replica, action.stage) for _, action in reduced.actions if action.kind is Kind.REDUCE]
    assert sorted(launched) == sorted(schedule.homes)


def test_large_ones_are_accepted() -> None:
    for name, stages, n in (("chimera", 32, 64), ("zbv", 16, 32), ("dualpipe", 16, 32), ("chimera-zb", 32, 32)):
        assert problems(generate(name, stages, n)) == []


def with_row(schedule: Schedule, worker: int, row: Row) -> Schedule:
    return replace(schedule, workers=(*schedule.workers[:worker], row, *schedule.workers[worker + 1 :]))


def drop(row: Row, at: int, _: Action) -> Row:
    return row[:at] + row[at + 1 :]


def double(row: Row, at: int, _: Action) -> Row:
    return (*row[: at + 1], *row[at:])


def put(row: Row, at: int, action: Action) -> Row:
    return (*row[:at], action, *row[at + 1 :])


CHANGES: dict[str, Callable[[Action], Action]] = {
    "stage": lambda a: a._replace(stage=a.stage + 1),
    "micro-batch": lambda a: a._replace(microbatch=a.microbatch + 1),
    "replica": lambda a: a._replace(replica=a.replica + 1),
    "part": lambda a: a._replace(part=1 if a.part is None else None),
    "kind": lambda a: a._replace(kind=Kind.FORWARD if a.kind is not Kind.FORWARD else Kind.BACKWARD),
    "update": lambda a: a._replace(kind=Kind.UPDATE),
}


@settings(max_examples=200, deadline=None)
@given(schedules(most_stages=6), st.data())
def test_damage_to_an_action_is_always_found(schedule: Schedule, data: st.DataObject) -> None:
    worker = data.draw(st.integers(0, len(schedule.workers) - 1))
    row = schedule.workers[worker]
    at = data.draw(st.integers(0, len(row) - 1))
    change = data.draw(st.sampled_from(["drop", "double", *CHANGES]))
    if change == "update" and row[at].kind is Kind.UPDATE:
        change = "drop"
    # On a single stage an update less is no damage: it only makes groups larger, or the step synchronous.
    assume(len(schedule.workers) > 1 or row[at].kind is not Kind.UPDATE)
    damage = {"drop": drop, "double": double}.get(change, put)
    changed = CHANGES.get(change, lambda action: action)(row[at])
    assert problems(with_row(schedule, worker, damage(row, at, changed))), f"{change} of {row[at]}"


@settings(max_examples=100, deadline=None)
@given(schedules(most_stages=6), st.data())
def test_an_action_on_the_wrong_worker_is_always_found(schedule: Schedule, data: st.DataObject) -> None:
    if len(schedule.workers) == 1:
        return
    source, target = data.draw(st.permutations(range(len(schedule.workers))))[:2]
    row = schedule.workers[source]
    at = data.draw(st.integers(0, len(row) - 1))
    damaged = with_row(schedule, source, drop(row, at, row[at]))
    other = damaged.workers[target]
    to = data.draw(st.integers(0, len(other)))
    damaged = with_row(damaged, target, (*other[:to], row[at], *other[to:]))
    assert problems(damaged)


@settings(max_examples=150, deadline=None)
@given(schedules(SYNCHRONOUS, most_stages=4), st.data())
def test_exchanged_actions_are_refused_exactly_where_they_cannot_run(schedule: Schedule, data: st.DataObject) -> None:
    """Some exchanges are sound. Whether one is, a second, plain definition of dependencies decides."""
    worker = data.draw(st.integers(0, len(schedule.workers) - 1))
    row = list(schedule.workers[worker])
    i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[i], row[j] = row[j], row[i]
    damaged = with_row(schedule, worker, tuple(row))
    assert (problems(damaged) == []) == can_run(damaged)


def can_run(schedule: Schedule) -> bool:
    """Take any action whose needs are done, as long as there is one."""
    rows = [list(row) for row in schedule.workers]
    done: set[tuple[str, int, int, int | None]] = set()

    def may(action: Action) -> bool:
        stage, kind, m, _, part = action
        if kind == "F":
            return stage == 0 or ("F", stage - 1, m, part) in done
        if kind == "W":
            return ("I", stage, m, part) in done
        last = stage == schedule.stages - 1
        return ("F", stage, m, part) in done and (last or ("I", stage + 1, m, part) in done)

    progress = True
    while progress:
        progress = False
        for row in rows:
            while row and may(row[0]):
                stage, kind, m, _, part = row.pop(0)
                done.add(("I" if kind == "B" else str(kind), stage, m, part))
                progress = True
    return not any(rows)


def parse(*rows: str) -> Schedule:
    return Schedule.parse("\n".join([*rows, f"mine: {len(rows)} stages, 2 micro-batches"]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1"], "micro-batch 1 on stage 1 has 1F1; it needs 1F1 and 1B1"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1B1"], "1B1 happens 2 times"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1"], "micro-batch 1 on stage 1 has 1F1, 1I1"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 2F1 2B1"], "2F1 on worker 1: stages are 0 to 1"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F2 1B2"], "1F2 on worker 1: micro-batches are 0 to 1"),
        (["0F0 0F1 0B0 1B1", "1F0 1B0 1F1 0B1"], "stage 1 of replica 0 has actions on workers 0 and 1"),
        (["0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"], "worker 1 does 1B0 at position 0, before 1F0"),
        (["0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1"], "worker 0 does 0W0 at position 2, before 0B0"),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            "deadlock: worker 0 waits at 0B0 for 1B0, worker 1 waits at 1F1 for 0F1 of worker 0",
        ),
        (["0F0 0F1@1 0B0 0B1@1", "1F0 1B0 1F1 1B1"], "stage 1 of replica 1 is on no worker"),
        (
            ["0F0.0 0F0.1 0F1 0B0.0 0B0.1 0B1", "1F0 1B0 1F1 1B1"],
            "worker 0 waits at 0B0.0 for 1B0.0, which no worker does",
        ),
        (["0F0 0F1 0B0 0R0 0B1", "1F0 1B0 1F1 1B1 1R1"], "worker 0 reduces at 0R0, before its gradient 0B1"),
        (["0F0 0F1 0B0 0B1 0R1", "1F0 1B0 1F1 1B1"], "stage 1 of replica 0 on worker 1 reduces its gradients 0 times"),
        (["0F0 0F1 0B0 0U0 0B1 0U1", "1F0 1B0 1U0 1F1 1B1"], r"micro-batches \[1\] of stage 1 go into no update"),
        (["0F0 0F1 0B0 0B1 0U1", "1F0 1B0 1U0 1F1 1B1 1U1"], "stage 0 updates after some micro-batches only"),
        (["0F0 0F1 0B0 0U1 0B1 0U1", "1F0 1B0 1U0 1F1 1B1 1U1"], "0U1 happens 2 times"),
    ],
)
def test_what_is_wrong_is_said(rows: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(parse(*rows))


def test_replicas_that_reduce_in_crossed_orders_are_refused() -> None:
    rows = [
        "0F0 1F1@1 0B0 1B1@1 0R0 1R1@1",
        "0F1@1 1F0 1B0 0B1@1 1R0 0R1@1",
    ]
    with pytest.raises(UserError, match="worker 1 reduces stage 1 before 0, worker 0 the other way round"):
        check(parse(*rows))


def test_a_cap_is_kept_or_named() -> None:
    schedule = generate("1f1b", 4, 8)
    assert check(schedule, cap=4) is schedule
    with pytest.raises(UserError, match="worker 0 holds the activations of 4 micro-batches, over the cap of 3"):
        check(schedule, cap=3)


@settings(max_examples=40, deadline=None)
@given(schedules(most_stages=6))
def test_programmes_send_and_receive_the_same_and_cannot_block(schedule: Schedule) -> None:
    steps = programme(schedule)
    assert [[s for s in row if isinstance(s, Action)] for row in steps] == [list(row) for row in schedule.workers]
    assert stuck(steps) == {}
    sent = [step.message for row in steps for step in row if isinstance(step, Send)]
    received = [step.message for row in steps for step in row if isinstance(step, Receive)]
    assert len(set(sent)) == len(sent)
    assert set(sent) == set(received)
    hops = sum(a != b for line in schedule.placement for a, b in pairwise(line))
    assert hops == 0 or sent
    assert sum(map(len, edges(steps).values())) == len(sent)


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_early_receives_keep_every_order(schedule: Schedule) -> None:
    for steps in programme(schedule):
        early = receiving_early(steps)
        for kind in (Action, Send, Receive):
            assert [s for s in early if isinstance(s, kind)] == [s for s in steps if isinstance(s, kind)]
        for step in steps:
            if isinstance(step, Receive):
                assert early.index(step) <= steps.index(step)


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_receives_in_time_keep_the_order_of_sends_and_stand_before_what_needs_them(schedule: Schedule) -> None:
    whole = programme(schedule)
    sent = edges(whole)
    for worker, steps in enumerate(whole):
        in_time = receiving_in_time(schedule, worker)
        assert [s for s in in_time if not isinstance(s, Receive)] == [s for s in steps if not isinstance(s, Receive)]
        received = [s.message for s in in_time if isinstance(s, Receive)]
        for (source, target), messages in sent.items():
            if target == worker:
                assert [message for message in received if message.source == source] == messages
        asked, late = set(), {message.token for message in received}
        for step in in_time:
            if isinstance(step, Receive):
                asked.add(step.message.token)
            elif isinstance(step, Action):
                assert set(needs(step, schedule.stages)) & late <= asked


def test_a_receive_in_time_waits_until_its_message_has_been_sent_for_a_while() -> None:
    """Where the second worker is behind, both messages are there when it begins its second forward."""
    schedule = generate("gpipe", 2, 3)
    assert " ".join(map(str, receiving_in_time(schedule, 1)[:6])) == (
        "receive of output 0F0 1F0 receive of output 0F1 1F1 receive of output 0F2 1F2"
    )
    slow = Costs((1.0, 3.0), (1.0, 1.0), (1.0, 1.0))
    assert " ".join(map(str, receiving_in_time(schedule, 1, slow)[:6])) == (
        "receive of output 0F0 1F0 receive of output 0F1 receive of output 0F2 1F1 1F2"
    )


def test_a_receive_waits_for_its_send() -> None:
    (first, _) = programme(generate("1f1b", 2, 3))
    assert " ".join(map(str, first[3:7])) == "send of output 0F1 receive of gradient 1I0 0B0 0F2"
    assert " ".join(map(str, receiving_early(first)[2:7])) == (
        "receive of gradient 1I0 0F1 send of output 0F1 0B0 receive of gradient 1I1"
    )


def test_a_programme_with_exchanged_receives_blocks() -> None:
    """What the run with rendezvous transfers is for: two receives in another order than their sends."""
    steps = programme(generate("gpipe", 2, 2))
    second = [step for step in steps[1] if isinstance(step, Receive)]
    swapped = {second[0]: second[1], second[1]: second[0]}
    broken = (steps[0], tuple(swapped.get(step, step) if isinstance(step, Receive) else step for step in steps[1]))
    assert isinstance(stuck(broken)[0], Send)
    assert isinstance(stuck(broken)[1], Receive)


def test_one_sided_orders_of_a_small_pipeline_are_judged_as_by_hand() -> None:
    """Of all orders of worker 1 in 2 stages, 2 micro-batches of GPipe, those accepted keep F before B of each."""
    rows = generate("gpipe", 2, 2).workers
    accepted = [
        order for order in permutations(rows[1]) if not problems(Schedule("gpipe", 2, 2, (rows[0], tuple(order))))
    ]
    by_hand = [
        order
        for order in permutations(rows[1])
        if all(order.index(Action(1, Kind.FORWARD, m)) < order.index(Action(1, Kind.BACKWARD, m)) for m in (0, 1))
    ]
    assert accepted == by_hand
