"""Several ranks on one GPU in parallel: CUDA's multi-process service (MPS), started for one job and ended with it.

Without it a GPU switches between processes. With it they run at once, each on its own part of the multiprocessors. NCCL
refuses ranks that share a GPU unless each says that it is on another host: `comm.devices.wiring` does this.
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

# bfloat16 matmuls run in clusters of up to eight blocks, which need neighbouring free multiprocessors. With more ranks
# than this, kernels that wait for a message can occupy the multiprocessors that the awaited rank needs for such a
# cluster, and all ranks deadlock. With eight parts of an H200, of 14 or 16 multiprocessors, a job hung within its first
# 60 steps in every try; with four parts of 32 it never did (2026-11-16, docs/performance.md).
SIDE_BY_SIDE = 4


@contextmanager
def sharing(ranks: int, kind: devices.Kind) -> Iterator[bool]:
    """While it is entered, processes that are started share this machine's GPUs. Returns whether they use MPS.

    If MPS is not installed or does not start, or more than `SIDE_BY_SIDE` ranks share a GPU, they share it in turns. An
    MPS that another program started is never used. Nothing is left behind.
    """
    have = 0 if kind == devices.CPU else devices.count(kind)
    each = -(-ranks // have) if have else 0
    if each < 2:
        yield False
        return
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="cubeloom-mps-") as name, _apart(Path(name), each):
        inside = dict(os.environ)
        failed = _start(each)
        if failed:
            _tell_turns(failed)
        try:
            yield not failed
        finally:
            if not failed:
                # Without a timeout MPS would wait for kernels of ended ranks, such as a receive that never completes.
                with suppress(subprocess.TimeoutExpired):
                    quits = b"quit -t 10\n"
                    subprocess.run([CONTROL], input=quits, env=inside, capture_output=True, timeout=60)


def _start(each: int) -> str:
    """Start MPS for this many ranks per GPU; return why it was not started, if so."""
    if shutil.which(CONTROL) is None:
        return "MPS is not installed"
    if each > SIDE_BY_SIDE:
        return f"side by side more than {SIDE_BY_SIDE} can hang"
    return "MPS did not start" if subprocess.run([CONTROL, "-d"], capture_output=True).returncode else ""


def _tell_turns(why: str) -> None:
    """Taking turns is much slower, and a user who measures should know."""
    sys.stderr.write(f"the ranks of a GPU take turns: {why}\n")


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """A process that gets a SIGTERM leaves its contexts first, as for an error, unless it has its own handler."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _apart(folder: Path, each: int) -> Iterator[None]:
    """Private folders, so that jobs of one machine do not interfere; an equal part of the multiprocessors for each rank
    of a GPU.

    By default a client of MPS has two queues into the GPU: streams that share one wait for each other, and a message
    that waits for its partner would block computation.
    """
    before = dict(os.environ)
    os.environ.update(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(100 // each), CUDA_DEVICE_MAX_CONNECTIONS="8")
    for name in ("PIPE", "LOG"):
        place = folder / name.lower()
        place.mkdir()
        os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = str(place)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
