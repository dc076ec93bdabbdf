"""`cubeloom plan --measure`: plans are trained, ranked by measured time, and correct the file of their cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cubeloom.base.errors import UserError
from cubeloom.cli.plan import Plan as Command
from cubeloom.plan.hardware import cluster, clusters, written
from cubeloom.plan.search import Answer, different, search
from cubeloom.plan.search.refine import plan_seconds
from cubeloom.plan.validate import Constants
from cubeloom.plan.validate.remeasured import remeasured
from cubeloom.tools.measure import measured, plans
from cubeloom.tools.measure.plans import STEPS


def command(**options: Any) -> Command:
    asked = {"model": "gpt-tiny", "cluster": "one-machine", "devices": 2, "global_batch": 8, "dtype": "float32"}
    return Command(**{**asked, **options})


@pytest.fixture(scope="module")
def answer() -> Answer:
    return search("gpt-tiny", "one-machine", 2, 8, dtype="fp32")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_plans_are_trained_and_ranked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, settings = tmp_path / "machine.toml", tmp_path / "job.toml"
    assert command(measure=2, write_cluster=file, output=settings, json=True)() == 0
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    first, second = (plan["measured"] for plan in found["plans"][:2])
    assert 0 < first["least_s"] <= first["step_s"] <= first["most_s"] and first["steps"] == STEPS
    assert first["step_s"] <= second["step_s"]
    assert found["failed"] == [] and "measured" not in found["plans"][2]
    assert "training plan 2 of 2" in err
    assert f'name = "{found["plans"][0]["schedule"].split()[0]}"' in settings.read_text()
    assert command(cluster=str(file))() == 0
    changed = cluster(file).device.facts["matmul_fraction"]
    assert "plan --measure 2 of gpt-tiny" in changed.source and changed.confidence == "measured"


def ranked(answer: Answer, monkeypatch: pytest.MonkeyPatch, count: int, *times: float | Exception) -> Any:
    """Measured without ranks: each plan takes the next time."""
    left = iter(times)

    def taken(job: object, steps: int) -> list[float]:
        time = next(left)
        if isinstance(time, Exception):
            raise time
        return [time] * steps

    class Ranks:
        def __enter__(self) -> Any:
            return taken

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(plans, "_ranks", lambda job, share_gpu: Ranks())
    return measured(answer, count)


def test_the_fastest_that_was_measured_is_first(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = different(answer, 3)
    found = ranked(answer, monkeypatch, 3, 0.3, 0.1, 0.2)
    assert [each.plan for each in found.trained] == [second, third, first]
    assert found.answer.plans[:3] == (second, third, first)
    assert len(found.answer.plans) == len(answer.plans)


def test_a_plan_that_does_not_train_is_left_out_and_the_next_moves_up(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = different(answer, 2)
    found = ranked(answer, monkeypatch, 2, UserError("no memory"), 0.1, 0.2)
    assert [each.plan for each in found.failed] == [first] and found.failed[0].failed == "no memory"
    assert len(found.trained) == 2 and first not in found.answer.plans
    assert found.as_json(3)["failed"][0]["measured"] == {"failed": "no memory"}


def test_the_corrected_cluster_predicts_what_was_measured(answer: Answer) -> None:
    """A machine of another speed than its file says is found by its steps."""
    some = [plan for plan in answer.plans if plan.simulated][:20:3]
    real = Constants(0.5, 0.3, 0.4).on(answer.cluster)

    def seconds(machine: Any) -> list[float]:
        return [plan_seconds(answer.model, machine, answer.task, answer.dtype, plan) for plan in some]

    took = seconds(real)
    before = max(abs(a / b - 1) for a, b in zip(seconds(answer.cluster), took, strict=True))
    made = remeasured(answer, some, took, "a test")
    after = max(abs(a / b - 1) for a, b in zip(seconds(made), took, strict=True))
    assert before > 0.4 and after < 0.05


def test_what_a_plan_takes_alone_is_what_the_search_says(answer: Answer) -> None:
    for plan in answer.plans[:5]:
        assert plan.simulated
        alone = plan_seconds(answer.model, answer.cluster, answer.task, answer.dtype, plan)
        assert alone == pytest.approx(plan.seconds, rel=1e-9)


@pytest.mark.parametrize("name", clusters())
def test_every_cluster_can_be_written(name: str, tmp_path: Path) -> None:
    known, file = cluster(name), tmp_path / "again.toml"
    file.write_text(written(known), encoding="utf-8")
    again = cluster(file)
    assert again == known and dict(again.facts) == dict(known.facts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": -1}, "--measure -1"),
        ({"measure": 1, "rehearse": 1}, "not both"),
        ({"write_cluster": Path("x.toml")}, "--write-cluster and --share-gpu are for --measure"),
        ({"measure": 1, "write_cluster": Path("/nowhere/x.toml")}, "no folder /nowhere"),
        ({"measure": 1, "devices": 1024, "cluster": "perlmutter", "global_batch": 1024}, "this machine can start"),
        ({"measure": 1, "cluster": "dgx-h100"}, "torch sees none here"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command(**options)()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_ranks_that_torchrun_started_train_the_plans() -> None:
    asked = "--model gpt-tiny --cluster one-machine --devices 2 --global-batch 8 --dtype float32 --measure 1 --json"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "cubeloom", "plan"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, *asked.split(" ")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # rank 0 alone speaks
    assert json.loads(line)["plans"][0]["measured"]["step_s"] > 0
