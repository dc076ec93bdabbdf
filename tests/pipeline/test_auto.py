"""The search is never slower than a named schedule under the same cap, and its bound is a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom import UserError
from cubeloom.pipeline import Costs, generate, problems, simulate
from cubeloom.pipeline.bounds import lower_bound
from cubeloom.pipeline.listing import Layout, listed
from cubeloom.pipeline.memory import in_flight
from cubeloom.pipeline.polish import polish
from cubeloom.pipeline.schedules.auto import Placement, auto
from pipeline.legal import NAMED, schedules, stage_costs

CHUNKED = ("interleaved", "zbv", "dualpipev", "hanayo")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_named_schedule_under_the_cap_is_faster(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 5))
    n = data.draw(st.integers(1, 2 * stages + 2))
    costs = data.draw(stage_costs(stages))
    cap = data.draw(st.sampled_from([1, stages / 2, stages, 2 * stages])) + 1
    plan = auto(stages, n, costs, cap=cap, tries=12)
    assert problems(plan.schedule) == []
    assert all(in_flight(row, plan.costs.activation) <= cap + 1e-9 for row in plan.schedule.workers)
    assert simulate(plan.schedule, plan.costs).makespan == pytest.approx(plan.makespan)
    assert plan.bound <= plan.makespan + 1e-9
    assert plan.gap == pytest.approx(plan.makespan / plan.bound - 1)
    for name in NAMED:
        try:
            rival = generate(name, stages, n, tries=12 if name == "chimera-zb" else None)
        except UserError:
            continue
        own = costs.cut(2) if name in CHUNKED else costs
        if all(in_flight(row, own.activation) <= cap for row in rival.workers):
            assert plan.makespan <= simulate(rival, own).makespan + 1e-9, name


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_bound_holds_for_every_named_schedule(data: st.DataObject) -> None:
    """No schedule beats the bound of its own layout, with the cap it happens to keep."""
    schedule = data.draw(schedules(most_stages=5))
    costs = data.draw(stage_costs(schedule.stages))
    shares = [[m for m, r in enumerate(schedule.assignment) if r == replica] for replica in range(schedule.replicas)]
    layout = Layout(
        schedule.stages, len(schedule.workers), schedule.placement, tuple(range(len(share)) for share in shares)
    )
    timeline = simulate(schedule, costs)
    if schedule.halved:
        layout = replace(layout, microbatches=tuple(range(2 * len(share)) for share in shares))
        costs = costs.part(0.5)
    assert lower_bound(layout, costs, max(timeline.peak_activations)) <= timeline.makespan + 1e-9


@pytest.mark.parametrize(
    ("placement", "makespan"),
    [(Placement.LINEAR, 31), (Placement.V, 27.5), (Placement.BIDIRECTIONAL, 27), (Placement.ANY, 27)],
)
def test_it_proves_the_best_known_orders_of_d_8_n_8_optimal(placement: Placement, makespan: float) -> None:
    plan = auto(8, 8, placement=placement)
    assert plan.makespan == makespan
    assert plan.gap == pytest.approx(0)
    assert max(simulate(plan.schedule, plan.costs).peak_activations) <= 8


@pytest.mark.slow
def test_it_can_beat_every_named_schedule() -> None:
    """With dear messages and cheap weight gradients none of the fixed orders fits."""
    costs = Costs.uniform(4, 1.0, 1.3, 0.7, 0.2)
    plan = auto(4, 8, costs, placement=Placement.BIDIRECTIONAL)
    assert plan.makespan < min(makespan for _, makespan in plan.rivals)


def test_a_smaller_cap_costs_time() -> None:
    makespans = [auto(4, 8, cap=cap, placement=Placement.LINEAR, tries=50).makespan for cap in (1, 2, 4)]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[0] > makespans[2]


def test_a_cap_that_nothing_keeps_is_refused_with_the_least() -> None:
    with pytest.raises(UserError, match=r"keeps to a cap of 0.5 activations; the least is 1"):
        auto(4, 8, cap=0.5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_lists_end_and_keep_the_cap(data: st.DataObject) -> None:
    """Also with several stages a worker, and a cap that leaves room for one micro-batch of each only."""
    workers = data.draw(st.integers(1, 4))
    line = data.draw(st.permutations([w for w in range(workers) for _ in range(data.draw(st.integers(1, 3)))]))
    costs = data.draw(stage_costs(len(line)))
    cap = max(line.count(w) for w in range(workers)) + data.draw(st.integers(0, 3))
    split, reserve = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    layout = Layout.single(line, data.draw(st.integers(1, 9)))
    schedule = listed("mine", layout, costs, cap, split=split, reserve=reserve)
    assert problems(schedule) == []
    assert max(map(in_flight, schedule.workers)) <= cap


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_polish_never_spoils(data: st.DataObject) -> None:
    schedule = data.draw(schedules(most_stages=4))
    costs = data.draw(stage_costs(schedule.stages))
    before = simulate(schedule, costs)
    cap = max(map(in_flight, schedule.workers))
    after = polish(schedule, costs, cap, 0.0, 30)
    assert problems(after) == []
    assert max(map(in_flight, after.workers)) <= cap
    assert simulate(after, costs).makespan <= before.makespan + 1e-9
