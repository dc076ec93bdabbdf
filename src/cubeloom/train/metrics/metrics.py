"""Writes down a run's metrics while it trains; on one rank only."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cubeloom.base.file_errors import retried
from cubeloom.train.job.settings import MetricsSettings
from cubeloom.train.metrics.log import NAME, Event, forget_from
from cubeloom.train.metrics.record import Record, finite
from cubeloom.train.metrics.sinks import check_sinks, make_sinks


class Metrics:
    """Opened with the first step that will run. Records of that step and later ones, which a crashed attempt wrote, are
    removed, so that each step appears once. Events stay.
    """

    def __init__(self, folder: Path, settings: MetricsSettings, first_step: int) -> None:
        self._every = settings.every
        self._left_out: Record | None = None
        check_sinks(settings)
        self._path = folder / NAME
        self._closed = False
        retried(f"cannot write {self._path}", lambda: folder.mkdir(parents=True, exist_ok=True))
        retried(f"cannot write {self._path}", lambda: forget_from(self._path, first_step))
        self._open: int | None = None
        self._append(b"")
        self._sinks = make_sinks(folder, settings, first_step)

    def write(self, record: Record) -> None:
        """Call it for every step. With `metrics.every` only every n-th, remarkable steps and the last are kept."""
        if record.step % self._every and not record.remarkable:
            self._left_out = record
        else:
            self._keep(record)

    def event(self, name: str, /, **fields: Any) -> None:
        """Such as start, resume, skip, checkpoint, best, and at the end done, early stop or asked to stop.

        An event with a field `step` appears on the curves.
        """
        plain = {key: finite(value) for key, value in fields.items()}
        self._line(Event(name, time.time(), plain).as_json())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._left_out is not None:
            self._keep(self._left_out)
        self._shut()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, record: Record) -> None:
        self._left_out = None
        self._line(record.as_json())
        for sink in self._sinks:
            sink.write(record)

    def _line(self, values: dict[str, Any]) -> None:
        """Written at once as a whole line: readers see it, and a crash can cut off only the last line."""
        self._append((json.dumps(values, allow_nan=False, default=str) + "\n").encode())

    def _append(self, data: bytes) -> None:
        left = data

        def write() -> None:
            """Write the rest to a file that is reopened after an error: a file server may have forgotten the open one."""
            nonlocal left
            try:
                if self._open is None:
                    self._open = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                while left:
                    left = left[os.write(self._open, left) :]
            except OSError:
                self._shut()
                raise

        retried(f"cannot write {self._path}", write)

    def _shut(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            with suppress(OSError):
                os.close(opened)
