"""The search: what it refuses, what it finds, and that what it finds runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.base.settings import load as load_settings
from cubeloom.parallel import ParallelConfig
from cubeloom.pipeline.schedules import FAMILIES
from cubeloom.plan.cost_model.recompute import RECOMPUTE
from cubeloom.plan.cost_model.schedules import SHAPES
from cubeloom.plan.hardware import Cluster, cluster
from cubeloom.plan.model import load
from cubeloom.plan.search import Answer, configuration, explain, refine, search, why
from cubeloom.plan.search.best import Candidate, Tally
from cubeloom.plan.search.find import find
from cubeloom.plan.search.refine import as_candidate, placed, refined
from cubeloom.plan.search.space import Part, Task
from cubeloom.train.job import Job, check


@pytest.fixture(scope="module")
def small() -> Answer:
    return search("gpt-tiny", "perlmutter", 8, 16)


@pytest.fixture(scope="module")
def large() -> Answer:
    return search("gpt-80b", "perlmutter", 512, 512)


def tally_of(devices: int, memory: float) -> Tally:
    machine = cluster("perlmutter")
    machine = replace(machine, device=replace(machine.device, memory=memory))
    return find(load("gpt-5b"), machine, Task(32, 512, devices), "bf16", 10)[1]


def test_refused_and_found_are_all_that_was_considered() -> None:
    machine = cluster("perlmutter")
    machine = replace(machine, device=replace(machine.device, memory=20e9))
    found, tally = find(load("gpt-5b"), machine, Task(16, 512, 8), "bf16", keep=10**6)
    assert tally.considered == len(found) + sum(tally.refused.values())
    assert tally.refused["memory"] > 0 and len(found) > 100


def test_what_is_refused_for_memory_is_what_needs_too_much() -> None:
    """The memory that a search refuses by is that which its plans have, also where data cuts the optimizer's states."""
    model, machine, task, grid = load("gpt-5b"), cluster("perlmutter"), Task(16, 512, 16), Grid(pipe=2, data=8)
    every, _ = find(model, machine, task, "bf16", 10**6, Part.on(grid))
    plans = placed(model, machine, task, "bf16", every)
    middle = sorted(plan.total_memory for plan in plans)[len(plans) // 2]
    small = replace(machine, device=replace(machine.device, memory=1.001 * middle / (1 - task.reserve)))
    fitting = {as_candidate(plan) for plan in plans if plan.total_memory <= task.room(small)}
    found, _ = find(model, small, task, "bf16", 10**6, Part.on(grid))
    assert {replace(each, seconds=0.0) for each in found if not each.recompute} == fitting
    assert 0 < len(fitting) < len(plans)


def test_more_memory_never_makes_fewer_plans_legal() -> None:
    legal = []
    for memory in (5e9, 20e9, 40e9, 80e9, 1e12):
        tally = tally_of(8, memory)
        legal.append(tally.considered - sum(tally.refused.values()))
    assert legal == sorted(legal) and legal[0] < legal[-1]


def test_keeping_fewer_keeps_the_best() -> None:
    """What is not timed because it cannot be among the best indeed is not."""
    machine = cluster("perlmutter")
    every, _ = find(load("gpt-5b"), machine, Task(16, 512, 8), "bf16", keep=10**6)
    some, _ = find(load("gpt-5b"), machine, Task(16, 512, 8), "bf16", keep=50)
    assert [each.seconds for each in some] == pytest.approx([each.seconds for each in every[:50]])


def test_no_placement_is_faster_than_the_bound_and_none_of_the_best_is_lost() -> None:
    """Here the best has data inside of z. By its time with data outside it would not have been among the few kept."""
    model, machine, task = load("llama-7b"), cluster("dgx-h100"), Task(32, 512, 16)
    grid = Grid(pipe=2, data=2, z=2, y=2)
    every, _ = find(model, machine, task, "bf16", 10**6, Part.on(grid))
    least: dict[Candidate, float] = {}
    for each in every:
        same = replace(each, seconds=0.0)
        least[same] = min(each.seconds, least.get(same, each.seconds))
    plans = placed(model, machine, task, "bf16", every)
    for plan in plans:
        assert plan.closed >= least[as_candidate(plan)] * (1 - 1e-9), plan
    found = search(model, machine, 16, 32, 512, only=grid, keep=20)
    best = sorted(plan.closed for plan in found.plans)
    assert best[:10] == pytest.approx([plan.closed for plan in plans[:10]])
    assert plans[0].grid.placement == ("pipe", "z", "data", "y", "x")


@pytest.mark.slow
def test_the_best_by_closed_form_is_among_the_best_simulated(large: Answer) -> None:
    timed = [plan for plan in large.plans if plan.simulated]
    assert len(timed) > 50
    assert [plan.seconds for plan in timed] == sorted(plan.seconds for plan in timed)
    first = min(timed, key=lambda plan: plan.closed)
    assert timed.index(first) < len(timed) / 4
    for plan in timed:
        assert plan.seconds == pytest.approx(plan.closed, rel=0.25)
        assert plan.seconds == pytest.approx(plan.computed + plan.bubble + plan.exposed, rel=0.02)


def test_plans_fit_and_use_all_devices(large: Answer) -> None:
    for plan in large.plans:
        assert plan.grid.world == 512
        assert plan.microbatches * plan.microbatch * plan.grid.data * plan.grid.z == 512
        assert plan.total_memory <= large.task.room(large.cluster)
        assert 0 < large.mfu(plan) < 1


def test_the_configuration_of_every_plan_can_run(small: Answer, tmp_path: Path) -> None:
    """Loaded as a job and laid out, which raises for what the runtime cannot do; with the bytes that the runtime predicts."""
    for number, plan in enumerate(small.plans[::4]):
        file = tmp_path / f"{number}.toml"
        file.write_text(configuration(small, plan))
        job = load_settings(Job, file)
        assert job.grid == plan.grid
        check(job, device_here=False)
        layout = job.laid_out()
        config = ParallelConfig.exact(job.grid, job.rest, job.batch, 2)
        for recompute in (plan.recompute, True):
            predicted = small.bytes(replace(plan, recompute=recompute))
            assert predicted == layout.volume(config, 0, True, recompute), plan
    assert number > 20


def test_every_schedule_is_weighed_but_those_that_search_or_train_something_else() -> None:
    left_out = {"auto"} | {name for name, family in FAMILIES.items() if not family.synchronous}
    assert {shape.name for shape in SHAPES} == set(FAMILIES) - left_out
    assert {(shape.mode, shape.pairs) for shape in SHAPES if shape.name == "chimera"} == {
        (mode, pairs) for mode in ("direct", "doubling", "halving") for pairs in (1, 2, 4)
    }


def test_every_schedule_and_recomputation_can_be_written_down(small: Answer, tmp_path: Path) -> None:
    answer = replace(small, model=load("gpt-5b"), task=replace(small.task, samples=32, sequence=128))
    plain = replace(small.plans[0], microbatches=4, microbatch=8, ways=1, recompute=False)
    plans = [
        replace(plain, shape=shape, grid=Grid(pipe=2 * (shape.pairs or 1)), microbatches=16 if shape.pairs == 4 else 4)
        for shape in SHAPES
    ]
    for number, plan in enumerate([*plans, *(replace(plans[0], recompute=each) for each in RECOMPUTE)]):
        file = tmp_path / f"{number}.toml"
        file.write_text(configuration(answer, plan))
        job = load_settings(Job, file)
        check(job, device_here=False)
        assert (job.schedule.name, job.schedule.mode) == (plan.shape.name, plan.shape.mode)
        assert job.layout.recompute == RECOMPUTE[plan.recompute]


def test_recomputation_is_weighed_only_where_it_is_needed() -> None:
    """In each case with as little as fits: more of it is never faster."""
    machine = cluster("perlmutter")
    machine = replace(machine, device=replace(machine.device, memory=20e9))
    found, tally = find(load("llama-7b"), machine, Task(16, 512, 8), "bf16", keep=10**6)
    seen = {replace(each, seconds=0.0) for each in found}
    assert len(seen) == len({replace(each, recompute=False) for each in seen})
    assert {each.recompute for each in found} == set(RECOMPUTE)
    assert tally.considered == len(found) + sum(tally.refused.values())


def test_a_large_model_without_a_pipeline_fits_where_blocks_are_recomputed() -> None:
    """FSDP of Llama-70B on 64 A100, as others train it."""
    (plan,) = search("llama-70b", "dgx-a100", 64, 64, only=Grid(z=64)).plans
    assert plan.recompute is True and plan.total_memory < 40e9


def test_recomputation_is_no_communication() -> None:
    """One device has none: all of its step is computation, whether it keeps activations or not."""
    machine, task = cluster("dgx-h100"), Task(8, 1024, 1)
    kept = search("gpt2-xl", machine, 1, 8, only=Grid(), keep=1).plans[0]
    candidates = [replace(as_candidate(kept), recompute=recompute) for recompute in RECOMPUTE]
    closed = placed(load("gpt2-xl"), machine, task, "bf16", candidates)
    simulated = refined(load("gpt2-xl"), machine, task, "bf16", closed, len(closed))
    assert {plan.recompute for plan in simulated} == set(RECOMPUTE)
    for plan in (*closed, *simulated):
        assert plan.exposed == pytest.approx(0.0, abs=1e-12 * plan.seconds) and plan.bubble == 0.0
    assert all(plan.exposed == 0.0 for plan in simulated)
    assert len({plan.computed for plan in closed}) == len(RECOMPUTE)


def test_no_bubble_is_negative(large: Answer) -> None:
    for answer in (large, search("llama3-8b", "dgx-h100", 8, 64), search("gpt-80b", "perlmutter", 64, 256)):
        assert min(plan.bubble for plan in answer.plans) >= 0.0


def test_a_schedule_too_long_to_simulate_puts_no_other_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few actions: what is shorter than the first schedules is simulated all the same, and the order is that
    of times, whichever they are. With room for what is shown, all of that is simulated."""

    def answer(actions: int, more: int) -> Answer:
        monkeypatch.setattr(refine, "ACTIONS", actions)
        monkeypatch.setattr(refine, "MORE", more)
        return search("llama3-8b", "dgx-h100", 8, 64)

    full = answer(10**9, 0)
    assert all(plan.simulated for plan in full.plans)
    longest = max(plan.microbatches * plan.grid.pipe for plan in full.plans)
    few = answer(2000, 0)
    simulated = [plan for plan in few.plans if plan.simulated]
    assert len({plan.shape for plan in simulated}) > 1 and len(simulated) < len(few.plans)
    assert any(plan.microbatches * plan.grid.pipe == longest for plan in few.plans if not plan.simulated)
    # Those that were not simulated stand by the closed form's time, corrected by what simulation changed in the others.
    ratio = median(plan.seconds / plan.closed for plan in simulated)
    times = [plan.seconds if plan.simulated else plan.closed * ratio for plan in few.plans]
    assert times == sorted(times)
    assert any(not plan.simulated for plan in few.plans[: few.plans.index(simulated[-1])])
    shown = answer(2000, 10**9).plans[: refine.SURE]
    assert all(plan.simulated for plan in shown)
    assert as_candidate(shown[0]) == as_candidate(full.plans[0])


def test_recorded_stages_cost_the_host_nothing_and_cubes_what_they_did() -> None:
    """A host that needs a millisecond to issue an operator: only what is recorded is as fast as without one."""
    machine = cluster("perlmutter")
    slow = replace(machine, device=replace(machine.device, host=1e-3))
    none = replace(machine, device=replace(machine.device, host=0.0))

    def seconds(on: Cluster, grid: Grid, record: bool) -> float:
        return search("gpt-tiny", on, 4, 16, only=grid, record=record).plans[0].seconds

    pipeline, cube = Grid(pipe=4), Grid(y=4)
    assert seconds(slow, pipeline, True) == seconds(none, pipeline, True) < seconds(slow, pipeline, False)
    assert seconds(slow, cube, True) == seconds(slow, cube, False)


def test_a_plan_that_computes_once_more_is_not_timed_as_a_recording() -> None:
    """It cannot be one. With little memory there is no other."""
    slow = replace(cluster("perlmutter"), device=replace(cluster("perlmutter").device, host=1e-3, memory=4.6e9))

    def seconds(record: bool) -> tuple[object, float]:
        best = search("gpt2-medium", slow, 2, 8, only=Grid(pipe=2), record=record).plans[0]
        return best.recompute, best.seconds

    assert seconds(True) == seconds(False)
    assert seconds(True)[0] is not False


def test_the_configuration_of_a_plan_that_can_be_recorded_says_so() -> None:
    answer = search("gpt-tiny", "perlmutter", 8, 16, record=True)
    plans = {plan.recordable: plan for plan in reversed(answer.plans)}
    assert "record = true" in configuration(answer, plans[True])
    assert "record" not in configuration(answer, plans[False])
    assert "record" not in configuration(replace(answer, task=replace(answer.task, record=False)), plans[True])


def test_one_grid_alone(small: Answer) -> None:
    grid = small.plans[0].grid
    own = search("gpt-tiny", "perlmutter", 8, 16, only=grid)
    assert {plan.grid.sizes == grid.sizes for plan in own.plans} == {True}
    assert own.plans[0].seconds == pytest.approx(small.plans[0].seconds, rel=1e-6)


def test_explain_says_why_a_grid_lost(large: Answer) -> None:
    best = large.plans[0]
    assert f"{best.grid} wins" in explain(large, best.grid).text
    lost = explain(large, Grid(pipe=8, data=8, y=2, x=4))
    assert "loses by" in lost.text and "computation" in lost.text
    refused = explain(large, Grid(y=512))
    assert refused.own is None and "heads over x and y" in refused.text
    with pytest.raises(UserError, match="has 8 devices"):
        explain(large, Grid(y=8))


def test_why_names_the_terms(large: Answer) -> None:
    best = large.plans[0]
    worse = replace(best, exposed=best.exposed + 1.0, computed=best.computed - 0.1, seconds=best.seconds + 0.9)
    assert why(best, worse) == "1 s less exposed communication, 0.1 s more computation"


def test_bytes_of_a_plan_are_exact(large: Answer) -> None:
    moved = large.bytes(large.plans[0])
    assert moved and all(size > 0 for size in moved.values())


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(UserError, match="did you mean"):
        search("gpt-80", "perlmutter", 8, 8)
    with pytest.raises(UserError, match="has 6144 devices"):
        search("gpt-tiny", "perlmutter", 100_000, 8)
    with pytest.raises(UserError, match="too long"):
        search("gpt-tiny", "perlmutter", 8, 8, sequence=65)
    with pytest.raises(UserError, match="images"):
        search("unet-tiny", "perlmutter", 8, 8, sequence=64)


def test_images_too() -> None:
    answer = search("unet-tiny", "dgx-h100", 4, 8)
    assert answer.plans and answer.refused


def test_a_search_needs_no_torch() -> None:
    code = (
        "import sys; from cubeloom.plan.search import search; search('gpt-tiny', 'perlmutter', 4, 8); "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "False"
