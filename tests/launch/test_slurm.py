"""The sbatch script that `cubeloom launch slurm` writes: what is in it, and what a real Slurm does with it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster_in_a_box import Box, why_not
from cubeloom import UserError
from cubeloom.base.settings import load, write
from cubeloom.cli.launch import Slurm
from cubeloom.launch import RankPool
from cubeloom.launch.slurm import SlurmScript, seconds
from cubeloom.train.job import Job
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import read_log

from .boxed_job import ranks_of, send, small_job
from .cluster import LocalSlurm, missing

STANDIN = Path(__file__).with_name("standin.py")
FILE = """
folder = "{folder}/run"
steps = 4
restarts = 1

[batch]
samples = 4
sequence = 16

[grid]
x = 2
z = 2
"""

real = pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed here: no {', '.join(missing())}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small job.toml"
    path.write_text(FILE.format(folder=tmp_path))
    return path


def script(file: Path, *overrides: str, **options: Any) -> SlurmScript:
    return Slurm(file=file, overrides=overrides, **options).script(load(Job, file, overrides))


def test_a_script_has_one_task_a_rank(file: Path) -> None:
    text = script(file, "--grid.data=4", "device=cuda", partition="a100", account="team").text()
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in (
        "#SBATCH --job-name=small-job",
        "#SBATCH --partition=a100",
        "#SBATCH --account=team",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=24:00:00",
        "#SBATCH --signal=USR1@180",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "export OMP_NUM_THREADS=1",
    ):
        assert line in lines
    assert (
        f"srun --cpus-per-task=8 --kill-on-bad-exit=0 --wait=60 cubeloom train '{file}' --grid.data=4 --device=cuda"
        in text
    )
    # sbatch reads options up to the first command.
    assert max(place for place, line in enumerate(lines) if line.startswith("#SBATCH")) < lines.index(
        f"cd -- {Path.cwd()} || exit"
    )


def test_a_job_on_the_cpu_asks_for_no_gpu(file: Path) -> None:
    lines = script(file).text().splitlines()
    assert not [line for line in lines if "gpu" in line.lower()]
    assert "#SBATCH --nodes=1" in lines
    assert "#SBATCH --ntasks-per-node=4" in lines


@pytest.mark.parametrize(
    ("world", "options", "nodes", "each"),
    [
        (4, {}, 1, 4),
        (8, {}, 1, 8),
        (16, {}, 2, 8),
        (12, {}, 2, 6),
        (16, {"gpus_per_node": 4}, 4, 4),
        (16, {"nodes": 8}, 8, 2),
        (16, {"nodes": 4, "gpus_per_node": 8}, 4, 4),
    ],
)
def test_ranks_lie_evenly_on_nodes(file: Path, world: int, options: dict[str, int], nodes: int, each: int) -> None:
    made = script(file, f"grid.data={world // 4}", "device=cuda", **options)
    assert (made.nodes, made.ranks_per_node) == (nodes, each)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["grid.data=5"], {"gpus_per_node": 8}, "20 ranks go by 1, 2, 4, 5 on a node"),
        ([], {"nodes": 3}, "cannot lie evenly on 3 nodes"),
        ([], {"nodes": 1, "gpus_per_node": 2}, "cannot lie evenly on 1 nodes with at most 2"),
        ([], {"nodes": 0}, "--nodes must be at least 1"),
        ([], {"time": "a day"}, "--time 'a day' should read as Slurm's do"),
        ([], {"time": "4"}, "would never get to work"),
        ([], {"partition": "a b"}, "--partition 'a b' is no name of one"),
        ([], {"account": "a\n#SBATCH --uid=0"}, "--account"),
    ],
)
def test_what_cannot_work_is_refused(file: Path, overrides: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        script(file, *overrides, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("time", "expected"),
    [("30", 1800), ("30:15", 1815), ("2:00:00", 7200), ("1-12", 129_600), ("1-0:30", 88_200), ("1-0:0:1", 86_401)],
)
def test_a_limit_as_slurm_writes_it(time: str, expected: int) -> None:
    assert seconds(time) == expected


def test_a_job_that_is_recorded_is_checked_as_on_its_gpus(file: Path, tmp_path: Path) -> None:
    recorded = ("grid.x=1", "grid.z=1", "grid.data=2", "layout.record=true")
    out = tmp_path / "job.sh"
    assert Slurm(file=file, output=out, overrides=(*recorded, "device=cuda"))() == 0
    for overrides, message in (
        (recorded, "use device = 'cuda'"),
        ((*recorded, "device=cuda", "layout.ways=2"), "stages cannot be recorded"),
    ):
        with pytest.raises(UserError, match=message):
            Slurm(file=file, output=out, overrides=overrides)()


def test_the_command_checks_the_job_and_writes_a_whole_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.sh"
    assert Slurm(file=file, output=out)() == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text() == script(file).text()
    assert Slurm(file=file)() == 0
    assert capsys.readouterr().out == out.read_text()
    before = sorted(tmp_path.iterdir())
    for command, message in (
        (Slurm(file=file, output=out, overrides=("grid.x=5",)), "cannot be cut over x=5"),
        (Slurm(file=file, output=out, overrides=("stpes=5",)), "did you mean 'steps'"),
        (Slurm(file=file, output=tmp_path / "none" / "job.sh"), "No such file or directory"),
        (Slurm(file=file, output=tmp_path), "is a folder"),
    ):
        with pytest.raises(UserError, match=message):
            command()
    assert sorted(tmp_path.iterdir()) == before
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def slurm() -> Iterator[LocalSlurm]:
    with LocalSlurm() as cluster:
        yield cluster


def submitted(slurm: LocalSlurm, folder: Path, made: SlurmScript) -> str:
    path = folder / "job.sh"
    path.write_text(made.text())
    return slurm.submit(path)


def stand_in(file: Path, *behaviour: str) -> SlurmScript:
    """The script of the job on two ranks, but for the command."""
    return replace(script(file, "grid.z=1"), command=(sys.executable, str(STANDIN), str(file.parent), *behaviour))


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.log"))


def memberships(folder: Path, attempt: int = 0) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}-{attempt}.json").read_text()) for rank in range(2)]


@pytest.mark.long
@real
@pytest.mark.timeout(300)
def test_ranks_find_their_job_and_each_other(slurm: LocalSlurm, file: Path) -> None:
    job = submitted(slurm, file.parent, stand_in(file))
    assert slurm.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", output(file.parent)
    found = memberships(file.parent)
    assert [each["rank"] for each in found] == [each["local_rank"] for each in found] == [0, 1]
    assert {(each["world"], each["by"], each["address"], each["restart"]) for each in found} == {
        (2, "srun", "localhost", 0)
    }


@pytest.mark.long
@real
@pytest.mark.timeout(300)
def test_a_step_that_failed_is_begun_again(slurm: LocalSlurm, file: Path) -> None:
    job = submitted(slurm, file.parent, stand_in(file, "fail-once"))
    assert slurm.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", output(file.parent)
    assert "attempt 0 ended with 1" in output(file.parent)
    first, second = memberships(file.parent), memberships(file.parent, attempt=1)
    assert first[0]["port"] != second[0]["port"]  # nobody meets a rank of the step before


@pytest.mark.long
@real
@pytest.mark.timeout(300)
def test_ranks_that_are_told_to_stop_are_queued_again(slurm: LocalSlurm, file: Path) -> None:
    job = submitted(slurm, file.parent, stand_in(file, "until-told"))
    wait_for_ranks(slurm, job, file.parent)
    slurm.call("scancel", "--signal=USR1", job)  # to the ranks and not the script, as --signal does
    slurm.wait(job, "PENDING")
    # Slurm would wait two minutes; within the same second it would take the new start for a late one of the old.
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    ended = slurm.wait(job, "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output(file.parent)
    assert {each["restart"] for each in memberships(file.parent, attempt=1)} == {1}


@pytest.mark.long
@real
@pytest.mark.timeout(300)
def test_a_job_that_is_cancelled_is_not_queued_again(slurm: LocalSlurm, file: Path) -> None:
    job = submitted(slurm, file.parent, stand_in(file, "until-told"))
    wait_for_ranks(slurm, job, file.parent)
    slurm.call("scancel", job)
    assert slurm.wait(job, "CANCELLED", "PENDING", "COMPLETED", "FAILED")["Restarts"] == "0"
    assert slurm.show(job)["JobState"] == "CANCELLED"


def wait_for_ranks(slurm: LocalSlurm, job: str, folder: Path) -> None:
    slurm.until(lambda: len(list(folder.glob("rank-*-0.json"))) == 2, f"the ranks of job {job} began", timeout=120)


@pytest.mark.long
@real
@pytest.mark.timeout(300)
def test_a_job_trains_through_slurm(slurm: LocalSlurm, file: Path) -> None:
    job = submitted(slurm, file.parent, script(file, "grid.z=1"))
    assert slurm.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", output(file.parent)
    lines = [json.loads(line) for line in (file.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2, 3]
    assert [len(line["processes"]) for line in lines if line.get("event") == "start"] == [2]


@pytest.mark.long
@real
@pytest.mark.skipif(bool(why_not()), reason=f"no cluster in a box: {why_not()}")
@pytest.mark.timeout(400)
def test_two_nodes_lose_a_rank_and_go_on(ranks: RankPool, tmp_path: Path) -> None:
    """The script restarts the step on both nodes, with the curve of the undisturbed run."""
    undisturbed, disturbed = (small_job(tmp_path / name) for name in ("undisturbed", "disturbed"))
    ranks.run(2, train, undisturbed)
    path = tmp_path / "job.toml"
    path.write_text(write(disturbed))
    with Box(hosts=2) as box, LocalSlurm(box.hosts) as slurm:
        job = submitted(slurm, tmp_path, script(path, nodes=2))
        slurm.until(lambda: len(losses(disturbed)) >= 30, "30 steps are done", 120)
        assert [len(ranks_of(host)) for host in box.hosts] == [1, 1]
        send(ranks_of(box.hosts[1])[0], signal.SIGKILL)
        assert slurm.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", output(tmp_path)
    assert "attempt 0 ended with" in output(tmp_path)
    assert losses(disturbed) == losses(undisturbed)


def losses(job: Job) -> list[float]:
    file = job.folder / "metrics.jsonl"
    return [record.loss for record in read_log(file).records] if file.exists() else []
