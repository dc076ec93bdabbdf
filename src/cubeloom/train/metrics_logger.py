"""Writes down a training: each step's record, from measurements of all ranks, and the timeline of a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from cubeloom.base.errors import first_line
from cubeloom.base.file_errors import retried
from cubeloom.base.files import replace_text
from cubeloom.comm import Network, devices
from cubeloom.train.job import Job
from cubeloom.train.metrics import Metrics, Record, flops_per_token, mfu, peak_of, progress, tokens_of, write_report
from cubeloom.train.metrics.timeline import NAME as TIMELINE
from cubeloom.train.step_times import Waiting
from cubeloom.train.trainer import StepResult, Trainer


class MetricsLogger:
    """On all ranks, because all are measured; rank 0 writes."""

    def __init__(self, trainer: Trainer, stack: ExitStack) -> None:
        self._job: Job = trainer.job
        self._network: Network = trainer.network
        self._schedule = str(trainer.pipeline.schedule)
        self._flops = flops_per_token(self._job)
        self._tokens = self._job.batch.samples * tokens_of(self._job.source(), self._job.batch)  # per step
        self._peak = peak_of(devices.name(self._network.device), self._job.dtype)
        self._own_memory = 0  # this rank's peak at the last update of the global peak
        self._memory = 0  # the largest peak of all ranks
        self._metrics: Metrics | None = None
        if self._network.rank == 0:
            self._metrics = stack.enter_context(Metrics(self._job.folder, self._job.metrics, trainer.done))
            self._shown = stack.enter_context(progress(self._job.steps, trainer.done))

    def write(
        self,
        step: int,
        stepped: StepResult,
        seconds: float,
        asked_to_stop: bool,
        validation: float | None = None,
        own: Mapping[str, float] | None = None,
    ) -> bool:
        """Write down a step; return whether any rank was asked to stop."""
        waiting = Waiting.of(stepped.waits)
        # Each rank has its own clock: the parts of a step add up to the whole only as means over the same ranks.
        seconds, exposed, bubble, asked = self._together(
            seconds, waiting.for_collectives, waiting.for_stages, asked_to_stop
        )
        if self._metrics is not None:
            tokens = self._tokens / seconds
            record = Record(
                step=step,
                loss=stepped.loss,
                gradient_norm=stepped.norm,
                learning_rate=stepped.rate,
                seconds=seconds,
                tokens_per_s=tokens,
                mfu=mfu(tokens, self._flops, self._peak, self._job.grid.world),
                memory_bytes=self._memory,
                computing_s=max(0.0, seconds - exposed - bubble),
                exposed_s=exposed,
                bubble_s=bubble,
                skipped=stepped.skipped,
                validation=validation,
                own=dict(own or {}),
            )
            self._metrics.write(record)
            self._shown.show(record)
        return asked

    def _together(self, seconds: float, exposed: float, bubble: float, asked: bool) -> tuple[float, float, float, bool]:
        """Means over all ranks, and whether any was asked to stop. Also updates the largest memory of any rank."""
        everybody, device = self._network.everybody, self._network.device
        peak = devices.peak_memory(device)
        told = [seconds, exposed, bubble, asked, peak > self._own_memory]
        mine = torch.tensor(told, dtype=torch.float64, device=device)
        *times, any_asked, any_grew = everybody.all_reduce(mine, "times").wait().tolist()
        if any_grew:  # rare in steady state: most steps need one sum and no maximum
            self._own_memory = peak
            own = torch.tensor(peak, dtype=torch.float64, device=device)
            self._memory = int(everybody.all_reduce(own, "memory", largest=True).wait().item())
        seconds, exposed, bubble = (each / everybody.size for each in times)
        return seconds, exposed, bubble, any_asked > 0

    def event(self, name: str, words: str = "", /, **fields: Any) -> None:
        """`words` are also shown."""
        if self._metrics is not None:
            self._metrics.event(name, **fields)
            if words:
                self._shown.say(words)

    def draw(self, step: int, stepped: StepResult) -> None:
        """Store the timeline of this step: when each worker ran which action."""
        here = self._network.coordinates
        first = all(place == 0 for axis, place in here.items() if axis != "pipe")
        spans = [asdict(span) for span in stepped.times.spans(stepped.waits)] if first else None
        rows = [row for row in self._network.host_group.gather(spans) if row is not None]
        if self._metrics is not None:
            kept = {"step": step, "unit": "s", "schedule": self._schedule, "workers": rows}
            file = self._job.folder / TIMELINE
            retried(f"cannot write {file}", lambda: replace_text(file, json.dumps(kept)))


@contextmanager
def metrics_logger(trainer: Trainer) -> Iterator[MetricsLogger]:
    with ExitStack() as stack:
        yield MetricsLogger(trainer, stack)
    if trainer.network.rank == 0:
        _report(trainer.job)


def _report(job: Job) -> None:
    """Write the report. The training has ended well, so a failure here is not an error."""
    try:
        write_report(job.folder)
    except Exception as error:
        sys.stderr.write(f"no report was written: {first_line(error)}; `cubeloom report {job.folder}` tries again\n")
