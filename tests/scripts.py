"""Scripts and commands in processes of their own, as a person runs them, but forked from the server of the ranks.

So is the server that their own ranks fork from. That saves every import of torch, which takes longer than most scripts do, and
what a script imports itself is imported once for it and all of its ranks.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

from cubeloom import cli
from cubeloom.launch.ready import PRELOAD

PATIENCE = 170.0


class Started:
    """A process that runs."""

    def __init__(
        self, main: Callable[[], None], words: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.arguments = [*words]
        self._said = tempfile.TemporaryDirectory(prefix="cubeloom-script-")
        self._files = Path(self._said.name, "out"), Path(self._said.name, "errors")
        environment = {**os.environ, **variables}
        self._process = context.Process(target=_as_main, args=(main, self.arguments, folder, environment, *self._files))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self.poll()

    def done(self, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Wait for its end. One that outlasts the time is killed, and that is an error."""
        code = self.wait(timeout)
        if code is None:
            self._process.kill()
            self._process.join()
        out, errors = (file.read_text() for file in self._files)
        self._said.cleanup()
        if code is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout, out, errors)
        return subprocess.CompletedProcess(self.arguments, code, out, errors)


def start_script(script: Path, *arguments: str, folder: Path | None = None, **variables: str) -> Started:
    """`python script arguments` in this folder."""
    main = partial(_run_file, script.absolute())
    return Started(main, [str(script), *arguments], folder or Path.cwd(), variables)


def start_cubeloom(*arguments: str, folder: Path | None = None, **variables: str) -> Started:
    """`cubeloom arguments` in this folder."""
    return Started(_run_cubeloom, ["cubeloom", *arguments], folder or Path.cwd(), variables)


def run_script(script: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return start_script(script, *arguments, folder=folder).done()


def run_cubeloom(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return start_cubeloom(*arguments, folder=folder, **variables).done()


def _as_main(
    main: Callable[[], None], words: list[str], folder: Path, environment: dict[str, str], out: Path, errors: Path
) -> None:
    for stream, file in ((1, out), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = words
    # Two names for one, as in every process that starts others.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    main()


def _run_cubeloom() -> None:
    _begin_own_server()
    cli.main()


def _run_file(script: Path) -> None:
    sys.path.insert(0, str(script.parent))
    tree = ast.parse(script.read_text(), str(script))
    with suppress(Exception):  # the script itself will meet it
        imports: list[ast.stmt] = [each for each in tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(imports, []), str(script), "exec"), {})
    _begin_own_server()
    main = sys.modules["__main__"]
    main.__file__ = str(script)
    exec(compile(tree, str(script), "exec"), main.__dict__)


def _begin_own_server() -> None:
    """The server from which ranks of this process fork is forked from it as well, while it has one thread yet."""
    started = util.spawnv_passfds

    def forked(path: bytes, words: list[str], passed: Sequence[int]) -> int:
        if "forkserver" not in words[-1]:
            return started(path, words, passed)
        child = os.fork()
        if child:
            return child
        try:
            # As of one that is started: without the end of the pipe that tells it when nobody needs it any more.
            kept = [2, *sorted(passed), os.sysconf("SC_OPEN_MAX")]
            for one, next_one in pairwise(kept):
                os.closerange(one + 1, next_one)
            exec(words[-1], {})
        finally:
            os._exit(0)

    with patch.object(util, "spawnv_passfds", forked):
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
