"""Several ranks on one GPU, side by side: CUDA's multi-process service (MPS), started for one job and ended with it.

Without it a GPU takes turns between processes. With it they run at once, each on its own part of the multiprocessors. NCCL
refuses ranks that share a GPU, unless each says that it is on another host: `comm.devices.wiring` lets them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cubeloom.comm import devices

CONTROL = "nvidia-cuda-mps-control"

# Products in bfloat16 run in clusters of up to eight blocks, which need free multiprocessors next to each other. Among more
# ranks than this, the kernels in which others wait for a message can hold the places that the rank they wait for needs for
# such a cluster, and all wait forever: with eight parts of an H200, of 14 or of 16 multiprocessors, a job hung within its
# first 60 steps whenever it was tried; with four parts of 32 never (2026-11-16, docs/performance.md).
SIDE_BY_SIDE = 4


@contextmanager
def sharing(ranks: int, kind: devices.Kind) -> Iterator[bool]:
    """While it is entered, processes that are started share this machine's GPUs; gives whether MPS helps them to.

    Where MPS is not installed or does not start, or more than `SIDE_BY_SIDE` ranks share a GPU, they share all the same, in
    turns. Nothing is left behind.
    """
    have = 0 if kind == devices.CPU else devices.count(kind)
    each = -(-ranks // have) if have else 0
    control = shutil.which(CONTROL)
    if each < 2:
        yield False
        return
    if control is None or each > SIDE_BY_SIDE:
        _tell_turns("MPS is not installed" if control is None else f"side by side more than {SIDE_BY_SIDE} can hang")
        yield False
        return
    before = dict(os.environ)
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="cubeloom-mps-") as name:
        os.environ.update(_variables(Path(name), each))
        started = subprocess.run([control, "-d"], capture_output=True).returncode == 0
        if not started:
            _restore(before)
            _tell_turns("MPS did not start")
        try:
            yield started
        finally:
            if started:
                # Without a time MPS would wait for kernels that ended ranks left behind, such as a receive that nobody serves.
                with suppress(subprocess.TimeoutExpired):
                    subprocess.run([control], input=b"quit -t 10\n", capture_output=True, timeout=60)
                _restore(before)


def _tell_turns(why: str) -> None:
    """It is much slower, and whoever measures should know."""
    sys.stderr.write(f"the ranks of a GPU take turns: {why}\n")


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """A process that is asked to end leaves its contexts first, as it would for an error, unless somebody else sees to that."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _variables(folder: Path, each: int) -> dict[str, str]:
    """Private places, so that jobs of one machine do not meet; an equal part of the multiprocessors for each rank of a GPU.

    A client of MPS has two queues into the GPU unless it asks for more: streams that share one wait for each other, and a
    message that waits for its partner would hold up computation.
    """
    found = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // each), "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    for name in ("PIPE", "LOG"):
        place = folder / name.lower()
        place.mkdir()
        found[f"CUDA_MPS_{name}_DIRECTORY"] = str(place)
    return found


def _restore(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
