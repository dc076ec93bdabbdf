"""Stopping on a signal: a rank records the signal, and all ranks stop together after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stop:
    """While it is entered, `asked` says whether a signal has come: Slurm's time limit, Ctrl-C, a closed terminal.

    A rank that does not finish its step is ended by the minder.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only the main thread can handle signals
            heard = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]  # nohup ignores SIGHUP
            self._before = {each: signal.signal(each, self._hear) for each in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
