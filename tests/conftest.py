from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from xdist.workermanage import WorkerController

import server_paths
from balance import Balanced, longest_first, quick
from cubeloom.launch import RankPool, elastic
from cubeloom.launch.ready import PRELOAD, preload
from cubeloom.launch.share_gpu import sharing
from serial_runs import Verified

# Packages and files that tests import, and what ranks then use: importing it takes a rank longer than most tests do.
IMPORTED = {
    "pytest": ["pytest"],
    "transformers": [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")],
    "diffusers": ["diffusers.models.unets.unet_2d"],
    # What torch imports when it first compiles.
    "compiling": ["torch._inductor.lowering", "torch._dynamo.backends.debugging", "torch.export._trace", "networkx"],
}

_SERIAL_RUNS = pytest.StashKey[Path]()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the suite, since much of it keeps one core busy; none besides this one where files are named."""
    return 2 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


def pytest_configure(config: pytest.Config) -> None:
    """A worker is told where serial runs are shared; every other process makes a folder for its session."""
    if hasattr(config, "workerinput"):
        config.stash[_SERIAL_RUNS] = Path(config.workerinput["serial_runs"])
        return
    made = TemporaryDirectory(prefix="cubeloom-serial-runs-")
    config.add_cleanup(made.cleanup)
    config.stash[_SERIAL_RUNS] = Path(made.name)


def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["serial_runs"] = str(node.config.stash[_SERIAL_RUNS])


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Balanced:
    return Balanced(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in quick(items):
        item.add_marker("quick")
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)


def pytest_collection_finish() -> None:
    """What has been imported stays. Tests collect garbage, and would search all of it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _server(request: pytest.FixtureRequest) -> None:
    """The server that ranks fork from. It imports what tests use, and their files, once for all ranks.

    What ranks write is pytest's to capture, as what this process writes while it sets up a test.
    """
    PRELOAD.extend(part for name, parts in IMPORTED.items() if name in sys.modules for part in parts)
    of_ranks = (item for item in request.session.items if "ranks" in getattr(item, "fixturenames", ()))
    files = {file.obj.__name__ for item in of_ranks if (file := item.getparent(pytest.Module)) is not None}
    PRELOAD.extend(sorted(files))
    if files:
        forkserver.set_forkserver_preload([server_paths.__name__, *preload()])
        with patch.dict(os.environ, PYTHONPATH=server_paths.with_tests()):
            forkserver.ensure_running()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes started once and shared by all tests, of a worker where pytest has several."""
    with RankPool(16) as pool:
        yield pool


@pytest.fixture(scope="session")
def verified(ranks: RankPool, pytestconfig: pytest.Config) -> Verified:
    """`verify` on the shared ranks, with serial runs that are computed once in a session."""
    return Verified(ranks, pytestconfig.stash[_SERIAL_RUNS])


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[[int], RankPool]]:
    """Ranks of the GPU that there is: a pool for every size asked for, in which each has the part that it has in a job."""
    with ExitStack() as kept:

        @cache
        def pool_of(ranks: int) -> RankPool:
            # Only its ranks are to see the variables of their MPS, which would fail with any process that is ended at work.
            with patch.dict(os.environ):
                kept.enter_context(sharing(ranks, "cuda"))
                return kept.enter_context(RankPool(ranks, "cuda"))

        yield pool_of


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """That an agent starts one is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(elastic, "elastic_launch", refuse)
