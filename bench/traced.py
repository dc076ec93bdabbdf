"""What a profiler's trace of one rank says of collectives and the kernels that compute."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.peers.timing import Step
from cubeloom.comm import devices

Spans = list[tuple[float, float]]  # one behind the other


def write(step: Step, device: torch.device, path: Path | None) -> None:
    """The trace of one step, to be opened in Perfetto; packed if the path ends in .gz. A rank without a path only joins in."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        devices.settle(device)
    if path is not None:
        profiler.export_chrome_trace(str(path))


@dataclass(frozen=True)
class Shown:
    """Milliseconds of kernels, from the first one's begin to the last one's end."""

    whole: float
    collectives: float
    others: float
    both: float  # at once

    @classmethod
    def of(cls, path: Path) -> Shown:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return cls.of_events(json.loads(text)["traceEvents"])

    @classmethod
    def of_events(cls, events: Iterable[dict[str, object]]) -> Shown:
        kernels = [event for event in events if event.get("cat") == "kernel"]
        all_ = _union(kernels)
        collectives = _union(event for event in kernels if "nccl" in str(event["name"]).lower())
        others = _union(event for event in kernels if "nccl" not in str(event["name"]).lower())
        both = _length(collectives) + _length(others) - _length(all_)
        whole = all_[-1][1] - all_[0][0] if all_ else 0.0
        return cls(*(span / 1000 for span in (whole, _length(collectives), _length(others), both)))

    def __str__(self) -> str:
        return (
            f"{self.whole:.1f} ms, a collective under way for {self.collectives:.1f}, another kernel for {self.others:.1f}, "
            f"both at once for {self.both:.1f}"
        )


def _union(events: Iterable[dict[str, object]]) -> Spans:
    joined: Spans = []
    for start, duration in sorted((float(str(event["ts"])), float(str(event["dur"]))) for event in events):
        end = start + duration
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
