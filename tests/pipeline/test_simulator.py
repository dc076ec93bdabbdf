"""Times and memory, against cases small enough to work out by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom import UserError
from cubeloom.pipeline import Action, Costs, Kind, Schedule, Sync, generate, simulate, synchronised
from cubeloom.pipeline.costs import parse_costs
from cubeloom.pipeline.dependencies import makes, needs
from cubeloom.pipeline.memory import in_flight, versions
from pipeline.legal import SYNCHRONOUS, schedules, stage_costs


def times(schedule: Schedule, costs: Costs) -> list[list[tuple[str, float, float]]]:
    return [[(str(s.action), s.start, s.end) for s in row] for row in simulate(schedule, costs).spans]


def test_messages_and_uneven_stages_by_hand() -> None:
    costs = Costs(forward=(1, 2), input_grad=(1, 2), weight_grad=(3, 1), message=0.5)
    assert times(generate("1f1b", 2, 2), costs) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 7, 11), ("0B1", 12, 16)],
        [("1F0", 1.5, 3.5), ("1B0", 3.5, 6.5), ("1F1", 6.5, 8.5), ("1B1", 8.5, 11.5)],
    ]
    timeline = simulate(generate("1f1b", 2, 2), costs)
    assert (timeline.makespan, timeline.ideal) == (16, 10)
    assert timeline.bubble_ratio == (1 - 10 / 16, 1 - 10 / 16)


def test_a_message_between_chunks_of_one_worker_is_free() -> None:
    costs = Costs.uniform(2, message=5.0)
    assert times(Schedule.parse("0F0 1F0 1B0 0B0\nv: 2 stages, 1 micro-batches"), costs)[0][-1] == ("0B0", 4, 6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_times_obey_rows_dependencies_and_costs(data: st.DataObject) -> None:
    """Every action starts exactly when its worker is free and all it needs has arrived: not before, not after."""
    schedule = data.draw(schedules(most_stages=5))
    costs = data.draw(stage_costs(schedule.stages))
    timeline = simulate(schedule, costs)
    makers = {makes(action): (worker, action) for worker, action in schedule.actions}
    for worker, row in enumerate(timeline.spans):
        free = 0.0
        for span in row:
            due = [free]
            for token in needs(span.action, schedule.stages):
                home, made_by = makers[token]
                due.append(timeline.span(made_by).end + (costs.message * span.action.size if home != worker else 0.0))
            assert span.start == pytest.approx(max(due))
            took = costs.time(span.action) if span.action.kind is not Kind.UPDATE else 0.0
            assert span.end - span.start == pytest.approx(took)
            free = span.end


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_memory_over_time_peaks_where_the_order_says(data: st.DataObject) -> None:
    schedule = data.draw(schedules(most_stages=5))
    timeline = simulate(schedule, data.draw(stage_costs(schedule.stages)))
    assert list(timeline.peak_activations) == pytest.approx([in_flight(row) for row in schedule.workers])
    for curve in timeline.activations:
        assert curve[-1][1] == pytest.approx(0)
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)


def test_recomputation_costs_a_forward_and_keeps_only_inputs() -> None:
    costs = replace(Costs.uniform(4), recompute=frozenset(range(4)), boundary=0.1)
    timeline = simulate(generate("gpipe", 4, 8), costs)
    assert timeline.makespan == (1 + 3) * (8 + 3)
    # 7 inputs at rest and one micro-batch whole, in the last forward and in the first backward.
    assert timeline.peak_activations == pytest.approx([0.7 + 1] * 4)
    some = simulate(generate("gpipe", 4, 8), replace(costs, recompute=frozenset({0})))
    assert some.peak_activations == pytest.approx([0.7 + 1, 8, 8, 8])


def test_reductions_eager_hide_in_bubbles() -> None:
    """Chimera, D = 4, reductions of 2: at the end both of a worker's stages wait; eager, the first is hidden."""
    schedule = generate("chimera", 4, 4)
    costs = replace(Costs.uniform(4), reduce=(2.0,) * 4)
    plain = simulate(schedule, costs)
    assert plain.makespan == 16 + 2 * 2
    assert simulate(synchronised(schedule, Sync.END), costs).makespan == plain.makespan
    eager = simulate(synchronised(schedule, Sync.EAGER), costs)
    assert eager.makespan == 16 + 2
    assert {reduction.stage: reduction.workers for reduction in eager.reductions} == {
        0: (0, 3),
        1: (1, 2),
        2: (1, 2),
        3: (0, 3),
    }


def test_eager_opt_launches_only_where_a_bubble_follows() -> None:
    """Section 3.2: the middle workers have no bubble after their first stage's last gradient, the outer ones do."""
    reduced = synchronised(generate("chimera", 8, 8), Sync.EAGER_OPT)

    def early(worker: int) -> list[str]:
        row = reduced.workers[worker]
        last = max(i for i, action in enumerate(row) if action.kind is not Kind.REDUCE)
        return [str(action) for action in row[:last] if action.kind is Kind.REDUCE]

    assert early(0) == ["7R7@1"]
    assert early(3) == []
    costs = replace(Costs.uniform(8), reduce=(4.0,) * 8, drag=0.5)
    spans = {sync: simulate(synchronised(generate("chimera", 8, 8), sync), costs).makespan for sync in Sync}
    assert spans[Sync.EAGER_OPT] <= spans[Sync.EAGER]
    assert spans[Sync.EAGER_OPT] < spans[Sync.END]


@settings(max_examples=30, deadline=None)
@given(schedules(SYNCHRONOUS, most_stages=4), st.integers(1, 4))
def test_a_free_eager_launch_is_never_slower(schedule: Schedule, cost: int) -> None:
    costs = replace(Costs.like(schedule), reduce=(float(cost),) * schedule.stages)
    end, eager = (simulate(synchronised(schedule, sync), costs).makespan for sync in (Sync.END, Sync.EAGER))
    assert eager <= end
    assert simulate(schedule, costs).makespan == pytest.approx(end)


def test_asynchronous_schedules_are_not_reduced() -> None:
    with pytest.raises(UserError, match="updates its weights as it goes"):
        synchronised(generate("pipedream", 4, 8), Sync.END)


def test_pipedream_uses_the_newest_weights_a_stage_has() -> None:
    """Stage s is D - 1 - s updates behind once the pipeline is full."""
    schedule = generate("pipedream", 4, 12)
    for stage in range(4):
        used = versions(schedule, stage)
        assert [used[0, stage, m] for m in range(12)] == [max(0, m - (3 - stage)) for m in range(12)]


def test_2bw_is_one_group_behind_on_every_stage() -> None:
    schedule = generate("pipedream-2bw", 4, 16)
    for stage in range(4):
        used = versions(schedule, stage)
        assert [used[0, stage, m] for m in range(16)] == [max(0, m // 4 - 1) for m in range(16)]


def test_a_schedule_that_never_ends_is_not_timed() -> None:
    rows = ((Action(0, Kind.BACKWARD, 0),),)
    with pytest.raises(UserError, match="never ends"):
        simulate(Schedule("bad", 1, 1, rows))


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(UserError, match="costs for 3 stages cannot time a schedule of 4"):
        simulate(generate("1f1b", 4, 4), Costs.uniform(3))
    with pytest.raises(UserError, match="weight_grad has 1 entries"):
        Costs((1, 1), (1, 1), (1,))
    with pytest.raises(UserError, match="cannot be negative: input_grad"):
        Costs((1,), (-1,), (1,))


@pytest.mark.parametrize("text", ["X=1", "F=one", "F=-1", "p2p=inf", "F"])
def test_costs_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"cost|number"):
        parse_costs(text)


def test_costs_are_read_as_they_are_written() -> None:
    assert parse_costs("I=2,p2p=0.5") == {"F": 1, "I": 2, "W": 1, "p2p": 0.5}


def test_a_large_schedule_is_timed_fast() -> None:
    """20 000 actions; the bound is loose, as the machine is shared."""
    schedule = generate("1f1b", 32, 320)
    started = time.process_time()
    simulate(schedule)
    assert time.process_time() - started < 2
