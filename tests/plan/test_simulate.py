"""The simulator against the pipeline's own, and the schedules' closed forms against both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cubeloom.base.grid import Grid
from cubeloom.pipeline import Costs
from cubeloom.pipeline import simulate as reference
from cubeloom.pipeline.memory import in_flight
from cubeloom.plan.cost_model.papers import chimera_all_reduce, chimera_step
from cubeloom.plan.cost_model.schedules import SHAPES, ScheduleModel
from cubeloom.plan.simulate import StageTimes, folded, schedule_of, simulate, simulate_ranks

TITLES = [shape.title for shape in SHAPES]
BY_TITLE = dict(zip(TITLES, SHAPES, strict=True))


def fewest(shape: ScheduleModel) -> int:
    """The fewest workers that the tests run it on."""
    return max(4, 2 * (shape.pairs or 1))


def counts(shape: ScheduleModel, workers: int) -> tuple[int, ...]:
    """Multiples of 2 D, or as many as it takes."""
    return (workers,) if shape.name == "hanayo" else (2 * workers, 4 * workers)


def legal(shape: ScheduleModel, workers: int, count: int) -> bool:
    return bool(np.all(shape.legal(workers, np.array(count))))


def random_times(stages: int, plans: int, seed: int, spread: float = 1.0) -> StageTimes:
    draw = np.random.default_rng(seed)
    f, i, w = (1 + spread * draw.random((stages, plans)) for _ in range(3))
    return StageTimes(f, i + w, i, w, 0.3 * draw.random(plans), np.zeros((stages, plans)))


@pytest.mark.parametrize("title", TITLES)
def test_many_at_once_are_simulated_as_one_by_one(title: str) -> None:
    shape = BY_TITLE[title]
    workers = fewest(shape)
    schedule = schedule_of(shape, workers, counts(shape, workers)[0])
    times = random_times(schedule.stages, 3, seed=len(title))
    found = simulate(schedule, times)
    for plan in range(3):
        f, i, w = (tuple(each[:, plan]) for each in (times.forward, times.input_grad, times.weight_grad))
        message = float(np.asarray(times.message)[plan])
        timeline = reference(schedule, Costs(f, i, w, message))
        assert found.seconds[plan] == pytest.approx(timeline.makespan)
        assert found.busy[:, plan] == pytest.approx(timeline.busy)


@pytest.mark.parametrize("title", [title for title in TITLES if title != "hanayo"])
def test_long_steps_follow_from_short_ones(title: str) -> None:
    shape = BY_TITLE[title]
    workers = fewest(shape)
    times = random_times(workers * shape.chunks, 2, seed=1, spread=0.0)
    whole = simulate(schedule_of(shape, workers, 12 * workers), times)
    assert folded(shape, workers, 12 * workers, times).seconds == pytest.approx(whole.seconds, rel=0.01)


@pytest.mark.parametrize("title", [title for title in TITLES if title not in ("hanayo", "chimera-zb")])
def test_no_worker_is_busier_than_a_long_step_lasts(title: str) -> None:
    """Stages that differ much make workers wait less with every round, which two short steps do not tell."""
    shape = BY_TITLE[title]
    workers = fewest(shape)
    times = random_times(workers * shape.chunks, 8, seed=2, spread=2.0)
    whole = simulate(schedule_of(shape, workers, 12 * workers), times)
    found = folded(shape, workers, 12 * workers, times)
    assert (found.pipeline - found.busy.max(axis=0) >= -1e-9).all()
    assert found.busy == pytest.approx(whole.busy)
    assert found.pipeline == pytest.approx(whole.pipeline, rel=0.04)


@pytest.mark.parametrize("title", TITLES)
def test_no_closed_form_waits_less_than_nothing(title: str) -> None:
    shape = BY_TITLE[title]
    draw = np.random.default_rng(0)
    for workers in (fewest(shape), 2 * fewest(shape)):
        for count in range(1, 4 * workers):
            if legal(shape, workers, count):
                f = draw.random(20)
                i, w = f * (0.8 + draw.random(20)), f * (0.5 + draw.random(20))
                assert (shape.bubble(workers, np.array(float(count)), f, i, w) >= 0).all()


@pytest.mark.parametrize("title", TITLES)
def test_closed_form_of_a_schedule_is_its_simulation(title: str) -> None:
    """Exact without messages for multiples of 2 D and equal costs; messages within a few per cent."""
    shape = BY_TITLE[title]
    for workers in (fewest(shape), 2 * fewest(shape)):
        for count in counts(shape, workers):
            assert legal(shape, workers, count)
            schedule = schedule_of(shape, workers, count)
            for message, tolerance in ((0.0, 1e-9), (0.1, 0.03)):
                wanted = reference(schedule, Costs.like(schedule, message=message)).makespan
                mine = 3 * count + shape.bubble(workers, np.array(count), 1.0, 1.0, 1.0)
                mine = mine + message * shape.messages(workers, np.array(count))
                assert float(mine) == pytest.approx(wanted, rel=tolerance), (workers, count, message)
            room = [schedule.chunk] * schedule.stages
            for worker, row in enumerate(schedule.workers):
                held = {stage for _, stage in schedule.held_by(worker)}
                assert set(shape.stages(workers, worker)) == held
                assert float(shape.in_flight(workers, np.array(count), worker)) >= in_flight(row, room) - 1e-9


def test_refuses_what_generators_refuse() -> None:
    for shape in SHAPES:
        for workers, count in ((2, 1), (3, 6), (4, 2), (4, 6), (6, 9), (8, 4), (8, 24)):
            if legal(shape, workers, count):
                schedule_of(shape, workers, count)  # raises if it cannot be


def test_chimeras_equation() -> None:
    """Equation 1 for one unit and for several is our closed form; its all-reduce is latency and bytes."""
    shape = BY_TITLE["chimera direct"]
    for workers, count in ((4, 4), (8, 8), (8, 24), (16, 32)):
        ours = count * 3.0 + float(shape.bubble(workers, np.array(count), 1.0, 1.0, 1.0))
        assert chimera_step(1.0, 2.0, 0.0, workers, count) == pytest.approx(ours)
    assert chimera_all_reduce(1e9, 8, 1e-6, 1e-10) == pytest.approx(6e-6 + 2 * 7 / 8 * 0.1)
    assert chimera_all_reduce(1e9, 1, 1e-6, 1e-10) == 0.0


def test_ranks_wait_for_the_slowest() -> None:
    grid = Grid(pipe=4, data=2, z=2, y=2)
    schedule = schedule_of(BY_TITLE["1f1b"], 4, 8)
    times = random_times(4, 1, seed=3)
    one = StageTimes(
        times.forward[:, 0], times.backward[:, 0], times.input_grad[:, 0], times.weight_grad[:, 0], 0.1, np.full(4, 0.5)
    )  # fmt: skip
    plain = simulate_ranks(schedule, one, grid)
    assert plain.seconds.shape == (2, 4)
    alone = simulate(schedule, replace_columns(one))
    assert plain.seconds == pytest.approx(np.broadcast_to(alone.seconds, (2, 4)))
    slowness = np.ones((4, 2, 4))
    slowness[2, 1, 3] = 1.5
    slowed = simulate_ranks(schedule, one, grid, slowness)
    # Its own pipeline is held up at every action; the other copy of the model when gradients are summed.
    assert (slowed.pipeline[1] > plain.pipeline[1]).all() and (slowed.pipeline[0] == plain.pipeline[0]).all()
    assert slowed.seconds.max() > plain.seconds.max()


def replace_columns(times: StageTimes) -> StageTimes:
    """The same as arrays over one plan."""
    names = ("forward", "backward", "input_grad", "weight_grad", "reduction")
    return replace(times, **{name: getattr(times, name)[:, None] for name in names})
