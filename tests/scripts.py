"""Scripts run as a person runs them, but for one thing: they fork from the server of the ranks, which has torch already."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from cubeloom.launch.ready import PRELOAD

PATIENCE = 170.0


def run_script(script: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python script arguments` in this folder, in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="cubeloom-script-") as said:
        files = Path(said, "out"), Path(said, "errors")
        process = context.Process(target=_as_main, args=(script.absolute(), arguments, folder or Path.cwd(), *files))
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(str(script), PATIENCE)
        out, errors = (file.read_text() for file in files)
        return subprocess.CompletedProcess([str(script), *arguments], process.exitcode, out, errors)


def _as_main(script: Path, arguments: tuple[str, ...], folder: Path, out: Path, errors: Path) -> None:
    for stream, file in ((1, out), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    main = ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = (
        main  # two names for one, as in every process that starts others
    )
    exec(compile(script.read_text(), str(script), "exec"), main.__dict__)
