"""Batches for one rank, prepared ahead of time."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.train.data.stream import Samples
from cubeloom.train.data.streaming import Streaming

AHEAD = 2
_Made = queue.Queue[dict[str, Tensor] | BaseException]


class Loader:
    """A rank's share of each batch: `tokens` and the `targets` that follow them, both `[n, sequence]`.

    Its only state is `position`, the number of the next sample, in whole batches: it does not depend on the grid. For
    streamed samples `progress` also has the position in the stream. A thread keeps two batches ready; `close`, or the
    end of a `with` block, ends it.
    """

    def __init__(self, samples: Samples, batch: int, share: slice | None = None, position: int = 0) -> None:
        whole = slice(0, batch) if share is None else share
        if not 0 <= whole.start < whole.stop <= batch:
            raise UserError(f"samples {whole.start} to {whole.stop} are no share of a batch of {batch}")
        if position < 0:
            raise UserError(f"a position is 0 or more, got {position}")
        self.batch = batch
        self.position = position
        self._streaming = samples if isinstance(samples, Streaming) else None
        self.waited = 0.0  # total seconds that callers had to wait for a batch
        self._made: _Made = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        arguments = (samples, batch, whole, position, self._made, self._stop)
        self._thread = threading.Thread(target=_work, args=arguments, name="cubeloom data", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._stop.set)  # the thread has no reference to us, so it ends with us

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")
        if self._failure is None:
            asked = time.perf_counter()
            made = self._made.get()
            self.waited += time.perf_counter() - asked
            if not isinstance(made, BaseException):
                self.position += self.batch
                if self._streaming is not None:
                    self._streaming.forget(self.position)
                return made
            self._failure = made
        raise self._failure

    @property
    def progress(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        stream = {} if self._streaming is None else {"stream": self._streaming.state(self.position)}
        return {"position": self.position, **stream}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        with suppress(queue.Empty):
            self._made.get_nowait()  # the thread may be waiting for a free place
        self._thread.join()


def read(samples: Samples, position: int, share: slice) -> dict[str, Tensor]:
    """A rank's share of the batch that starts with the sample of this number."""
    return samples.batch(torch.arange(position + share.start, position + share.stop))


def _work(samples: Samples, batch: int, share: slice, position: int, made: _Made, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            _put(made, read(samples, position, share), stop)
            position += batch
        except BaseException as error:  # raised again in the caller's thread
            _put(made, error, stop)
            return


def _put(made: _Made, item: dict[str, Tensor] | BaseException, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            made.put(item, timeout=0.05)
            return
        except queue.Full:
            continue
