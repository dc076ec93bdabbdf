"""Jobs on a Ray cluster: what is refused, what a node does, and real clusters of one node and of two."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_in_a_box import Box, why_not
from commands import exit_code
from cubeloom.base.host import interface_of
from cubeloom.base.settings import write
from cubeloom.launch import RankPool
from cubeloom.launch.environment import membership
from cubeloom.launch.ray import Ended
from cubeloom.launch.ray_node import Attempt, News, Node
from cubeloom.train.job import Job
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import read_log

from .boxed_job import ranks_of, send, small_job
from .ray_cluster import BoxedRay

STANDIN = Path(__file__).with_name("standin.py")
LOCAL = "127.0.0.1"


def settings_of(made: Job) -> Path:
    file = made.folder.parent / "job.toml"
    file.write_text(write(made))
    return file


@pytest.mark.parametrize(
    ("codes", "lost", "asked", "expected"),
    [
        ({0: 0, 1: 0}, {}, False, 0),
        ({1: -9, 0: 1}, {}, False, None),
        ({0: 0}, {1: "gone"}, False, None),
        ({0: 75}, {1: "gone"}, False, None),
        ({0: 75, 1: 75}, {}, False, 75),
        ({0: 75, 1: -15}, {}, True, 75),
        ({}, {}, True, 75),
        ({0: 2, 1: 1}, {}, False, 2),
    ],
)
def test_the_exit_code_of_an_attempt(
    codes: dict[int, int], lost: dict[int, str], asked: bool, expected: int | None
) -> None:
    assert Ended(codes, lost).exit_code(asked) == expected


def test_the_first_rank_that_failed_is_named() -> None:
    assert Ended({2: 75, 1: -9, 0: 1}).why() == "rank 1 failed with signal 9"
    assert Ended({0: 1}, {1: "gone"}).why() == "node 1 was lost: gone"


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert exit_code("launch", "ray", settings_of(small_job(tmp_path / "run"))) == 2
    assert "pip install 'cubeloom[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "3"], "cannot lie evenly on 3 nodes"),
        (["--cpus-per-rank", "0"], "--cpus-per-rank"),
        (["--wait", "0"], "--wait must be a number of seconds above 0"),
        (["--grid.x", "5"], "cannot be cut over x=5"),
        (["--adress", "a"], "did you mean --address?"),
        (["--address", "127.0.0.1:1"], "there is no Ray cluster at 127.0.0.1:1: [Errno 111] Connection refused"),
        (["--address", "node1"], "should be given as HOST:PORT"),
        (["--address", "ray://node1:10001"], "should be given as HOST:PORT"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert exit_code("launch", "ray", settings_of(small_job(tmp_path / "run")), *options) == 2
    assert message in capsys.readouterr().err


def test_the_address_of_the_environment_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    assert exit_code("launch", "ray", settings_of(small_job(tmp_path / "run"))) == 2
    assert "there is no Ray cluster at 127.0.0.1:2" in capsys.readouterr().err


class TwoNodes:
    """Two nodes in this process, whose ranks do not train: as the launcher drives them, without Ray."""

    def __init__(self, folder: Path, *behaviour: str) -> None:
        self._folder = folder
        self._behaviour = behaviour
        self.nodes: list[Node] = []
        self.codes: dict[int, int] = {}
        self.lines: list[str] = []

    def start(self, number: int) -> None:
        self.nodes = [Node(), Node()]
        attempt = Attempt(
            settings="steps = 7\n",
            command=(str(STANDIN), str(self._folder), *self._behaviour),
            folder=str(self._folder),
            world=2,
            ranks_per_node=1,
            address=LOCAL,
            port=self.nodes[0].host(LOCAL),
            number=number,
        )
        for rank, node in enumerate(self.nodes):
            node.start(attempt, [rank], LOCAL)

    def until_ended(self) -> dict[int, int]:
        deadline, codes = time.monotonic() + 60, dict[int, int]()
        while len(codes) < len(self.nodes) and time.monotonic() < deadline:
            for node in self.nodes:
                news = node.news()
                codes.update(news.codes)
                assert news.running == 1 - len(news.codes)
                self.lines += news.lines
        return codes


def test_ranks_use_the_network_of_ray_unless_the_node_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("RANK", "7")
    attempt = Attempt(
        settings="", command=(), folder="", world=4, ranks_per_node=2, address="10.0.0.1", port=1, number=3
    )
    found = attempt.variables(2, "eth0")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"], found["RANK"]) == ("ib0", "eth0", "2")
    here = membership(found)
    assert here is not None
    assert (here.rank, here.world, here.local_rank, here.restart, here.one_machine) == (2, 4, 0, 3, False)


def test_a_node_without_ranks_is_not_waited_for() -> None:
    """As when another node is lost before ranks start."""
    assert Node().news() == News([], {}, running=0)


def test_the_interface_of_an_address() -> None:
    assert interface_of(LOCAL) == "lo"
    assert interface_of("192.0.2.1") is None


@pytest.mark.slow
def test_ranks_of_two_nodes_meet_and_meet_again(tmp_path: Path) -> None:
    made = TwoNodes(tmp_path, "fail-once")
    for number, expected in ((0, {0: 1, 1: 1}), (1, {0: 0, 1: 0})):
        made.start(number)
        assert made.until_ended() == expected, made.lines
        found = [json.loads((tmp_path / f"rank-{rank}-{number}.json").read_text()) for rank in range(2)]
        assert [each["rank"] for each in found] == [0, 1]
        assert {(each["world"], each["local_rank"], each["restart"], each["hosted"]) for each in found} == {
            (2, 0, number, True)
        }
        assert all(each["agent"] and not each["one_machine"] for each in found)


@pytest.mark.long
def test_ranks_that_are_asked_to_stop_say_so(tmp_path: Path) -> None:
    made = TwoNodes(tmp_path, "until-told")
    made.start(0)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("rank-*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    for node in made.nodes:
        node.stop()
    assert made.until_ended() == {0: 75, 1: 75}


in_a_box = pytest.mark.skipif(bool(why_not()), reason=f"no cluster in a box: {why_not()}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Box, BoxedRay]]:
    with Box(hosts=2) as box, BoxedRay(box, tmp_path) as ray:
        yield box, ray


def losses(ranks: RankPool, folder: Path) -> list[float]:
    """Of the undisturbed run."""
    made = small_job(folder)
    ranks.run(2, train, made)
    return [record.loss for record in read_log(made.folder / "metrics.jsonl").records]


@pytest.mark.long
@pytest.mark.timeout(400)
@in_a_box
def test_a_killed_rank_and_a_lost_node(cluster: tuple[Box, BoxedRay], ranks: RankPool, tmp_path: Path) -> None:
    """The job goes on with the curve of the undisturbed one. The node comes back, as that of a cloud would."""
    box, ray = cluster
    made = small_job(tmp_path / "run")
    records = lambda: read_log(made.folder / "metrics.jsonl").records  # noqa: E731
    log = ray.launch(box.hosts[0], settings_of(made), "--nodes=2", "--wait=120")
    ray.until(lambda: made.folder.exists() and len(records()) >= 30, "30 steps are done", 120)
    assert [len(ranks_of(host)) for host in box.hosts] == [1, 1]
    send(ranks_of(box.hosts[1])[0], signal.SIGKILL)
    ray.until(
        lambda: bool(re.search(r"attempt 0 ended: rank [01] failed with signal 9", log.read_text())),
        "the failure is seen",
        60,
    )
    ray.until(lambda: len(records()) >= 60, "it goes on", 120)
    box.hosts[1].kill()
    ray.until(lambda: "attempt 1 ended: " in log.read_text(), "the loss is seen", 60)
    ray.start(box.hosts[1])
    launched = box.hosts[0].started[-1]
    ray.until(lambda: launched.poll() is not None, "the job has ended", 180)
    assert launched.returncode == 0, ray.words()
    assert f"step {made.steps - 1} (100%)" in log.read_text()
    assert [record.loss for record in records()] == losses(ranks, tmp_path / "undisturbed")


@pytest.mark.long
@pytest.mark.timeout(300)
@in_a_box
def test_what_one_node_answers(tmp_path: Path) -> None:
    """More nodes than there are, another folder, and a SIGTERM, after which the same command resumes."""
    with Box(hosts=1) as box, BoxedRay(box, tmp_path) as ray:
        [host] = box.hosts
        file = settings_of(small_job(tmp_path / "run", "", steps=20_000))

        def ended(*options: str) -> tuple[int, str]:
            before = (tmp_path / "launch.log").read_text() if (tmp_path / "launch.log").exists() else ""
            log = ray.launch(host, file, *options)
            process = host.started[-1]
            words = lambda: log.read_text().removeprefix(before)  # noqa: E731
            if not options:
                ray.until(lambda: "\nstep " in words(), "it trains", 120)
                process.terminate()
            ray.until(lambda: process.poll() is not None, "it has ended", 120)
            return process.returncode, words()

        code, words = ended("--nodes=2", "--grid.data=2", "--wait=1")
        assert (code, "it has 10.77.0.1 with 1 CPU" in words) == (2, True), words
        code, words = ended()
        assert code == 75, words
        steps = len(read_log(tmp_path / "run" / "metrics.jsonl").records)
        code, words = ended()
        assert (code, f"resuming at step {steps}" in words) == (75, True), words
        ray.launch(host, file)
        ray.until(lambda: len(ranks_of(host)) == 1, "a rank trains", 120)
        host.started[-1].kill()
        ray.until(lambda: not ranks_of(host), "the ranks of a launcher that was killed have ended", 60)
