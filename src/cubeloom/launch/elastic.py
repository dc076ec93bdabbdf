"""Starts the ranks of a job on this machine under torch's elastic agent: if one fails, all are restarted."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError, counted
from cubeloom.comm import world
from cubeloom.launch import rendezvous
from cubeloom.launch.gate import Gate
from cubeloom.launch.ready import preload
from cubeloom.launch.slurm import INTERRUPTED

_LOOK = 0.1  # seconds between two checks of the ranks by the agent
# Signals that the agent passes on to its ranks. Any other would end the agent alone and leave the ranks training.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# A folder shared by ranks and agent, in which a rank records that it was refused or asked to stop, and why.
Refusals = Path


class Interrupted(RuntimeError):
    """The agent or a rank was asked to stop, and the ranks have stopped."""


class JobFailed(RuntimeError):
    """A rank failed more often than the job may be restarted: says which, and how."""


def start(ranks: int, restarts: int, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
    """Run `function(refusals, *arguments)` on this many processes, and restart them if one dies; return results by
    rank.

    If a restart cannot help, a rank calls `refuse`: then this raises the same UserError. If a rank ends with `stop`,
    this raises Interrupted.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload(), function.__module__])
    with Gate(context) as end, tempfile.TemporaryDirectory(prefix="cubeloom-") as folder:
        refusals = Refusals(folder)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.BACKEND,
            local_addr=world.LOCAL,
            max_restarts=restarts,
            monitor_interval=_LOOK,
            start_method="forkserver",
            # An ignored signal, as under nohup, stays ignored: the agent would treat it as a request.
            signals_to_handle=",".join(e.name for e in _SIGNALS if signal.getsignal(e) is not signal.SIG_IGN),
        )
        _silence_torch()
        try:
            with _giving_signals_back(), _ranks_that_may_be_killed():
                return dict(elastic_launch(config, _live)(end, function, refusals, *arguments))
        except SignalException as error:
            raise Interrupted(error.sigval.name) from None
        except ChildFailedError as error:
            refused(refusals)
            rank, failure = error.get_first_failure()
            how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
            raise JobFailed(f"rank {rank} of {ranks} failed with {how}, after {counted(restarts, 'restart')}") from None


def _silence_torch() -> None:
    """Ranks report their errors themselves, in one line each. Each of torch's loggers has its own level."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing.spawn")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _live(end: Gate, function: Callable[..., Any], *arguments: Any) -> Any:
    threading.Thread(target=_end_with_agent, args=(end,), name="cubeloom agent", daemon=True).start()
    return function(*arguments)


def _end_with_agent(end: Gate) -> None:
    """An agent that is killed cannot end its ranks: they would train on unnoticed."""
    end.wait()
    os.kill(os.getpid(), signal.SIGTERM)


def _ranks_that_may_be_killed() -> AbstractContextManager[None]:
    """torch's ranks that have finished sleep in an Event until all have. If one is killed there, the agent never ends.

    And nobody learns which rank it was: it cannot say so, and the others only say that they wait for it.
    """
    return torch_private.watched_ranks(lambda method: Gate(multiprocessing.get_context(method)), _tell_killed)


def _tell_killed(ranks: int, codes: Mapping[int, int]) -> None:
    for rank, code in codes.items():
        if code < 0:
            memory = ", as the system does where memory runs out" if -code == signal.SIGKILL else ""
            sys.stderr.write(f"rank {rank} of {ranks}: ended by signal {-code} ({signal.strsignal(-code)}){memory}\n")


@contextmanager
def _giving_signals_back() -> Iterator[None]:
    """The agent installs handlers for these signals; restore the previous ones afterwards."""
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in before.items():
                signal.signal(each, handler)


def refuse(refusals: Refusals, error: UserError) -> None:
    """Record that a restart would not help."""
    (refusals / "refused").write_text(str(error), encoding="utf-8")


def stop(refusals: Refusals) -> NoReturn:
    """Record that all ranks have stopped because of a signal, and end this one.

    An agent that got the signal takes no results: a rank that waited to deliver its own would be killed in the end. An
    agent that did not get it would wait for the result of a rank that ended normally, so this rank ends as if it had
    failed.
    """
    with suppress(FileNotFoundError):  # an agent that gets a second signal does not wait, and removes the folder
        (refusals / "stopped").touch()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def refused(refusals: Refusals) -> None:
    """Raise the error that ranks recorded, if there is one: a restart would not help."""
    if (refusals / "refused").exists():
        raise UserError((refusals / "refused").read_text(encoding="utf-8"))
    if (refusals / "stopped").exists():
        raise Interrupted("a rank was asked to stop")
