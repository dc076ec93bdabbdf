"""Schedules in closed form: which stages a worker holds, what it waits, what it keeps; for D workers and N micro-batches.

This is Chimera's performance model (its equation 1) for every schedule that a plan chooses from: the time of a step is that of
the forwards, input gradients, weight gradients and messages on its critical path. What a worker computes all schedules have
in common; `bubble` is what is on the path beside it, and `messages` are those that nothing hides. Exact where N is a multiple
of 2D and costs are alike (tests hold it to the simulator), close elsewhere.

f, i, w are the times of a worker's share of the model; in a schedule without split backwards i + w is what one takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Stages = Callable[[int, int], tuple[int, ...]]  # of a worker among D


@dataclass(frozen=True, kw_only=True)
class ScheduleModel:
    """`N` may be an array; `f`, `i`, `w` too."""

    name: str
    bubble: Callable[[int, Any, Any, Any, Any], Any]  # D, N, f, i, w
    messages: Callable[[int, Any], Any]
    in_flight: Callable[[int, Any, int], Any]  # D, N, worker: micro-batches of the worker's share
    legal: Callable[[int, Any], Any] = lambda D, N: np.full(np.shape(N), True)
    rule: str = ""
    stages: Stages = lambda D, worker: (worker,)
    chunks: int = 1  # stages of a worker that one micro-batch goes through
    pairs: int | None = None
    mode: str | None = None
    split: bool = False  # a backward is an input gradient and a weight gradient
    halves: bool = False  # micro-batches are cut in two
    round: int = 1  # of how many times D micro-batches its order repeats itself

    @property
    def title(self) -> str:
        extra = [f"f={self.pairs}"] if self.pairs and self.pairs > 1 else []
        return " ".join([self.name, *([self.mode] if self.mode else []), *extra])

    @property
    def replicas(self) -> int:
        """Copies of every stage, on different workers."""
        return 2 * self.pairs if self.pairs else (2 if self.name in ("dualpipe", "gems") else 1)


def _split_wait(D: int, N: Any, f: Any, i: Any, w: Any) -> Any:
    """Weight gradients fill what the first micro-batches leave of the way there and back."""
    return np.maximum((D - 1) * f, (D - 1) * (f + i) - (np.minimum(N, D) - 1) * w)


def _v_wait(D: int, N: Any, f: Any, i: Any, w: Any) -> Any:
    return np.maximum((D - 1) * f / 2, (D - 1) * (f + i) - (N - 1) * w)


def _shortfall(D: int, N: Any) -> Any:
    return np.maximum(0, D - N)


def _twice(D: int, N: Any) -> Any:
    return N >= 2 * D


def _rounds(D: int, N: Any) -> Any:
    """Micro-batches in equal rounds of at least D."""
    return _divides(np.maximum(1, np.floor(np.asarray(N) / D)), N)


def _divides(part: Any, N: Any) -> Any:
    """As N % part == 0, which numpy takes ten times as long for."""
    parts = np.asarray(N) / part
    return parts == np.floor(parts)


def _chimera_bubble(pairs: int) -> Callable[[int, Any, Any, Any, Any], Any]:
    """Equation 1's counts, for f pairs: a unit of D micro-batches has D + D/f - 2 backwards on the path, of which D compute.

    From the second unit on, forwards of the next fill the gap. A unit that is not full leaves the rest of its slots empty.
    """

    def bubble(D: int, N: Any, f: Any, i: Any, w: Any) -> Any:
        gap = D // pairs - 2
        units = np.floor(np.asarray(N) / D)
        rest = N - units * D
        full = units * gap * (i + w) - np.maximum(units - 1, 0) * gap * f
        more = np.maximum(2 * (np.ceil(rest / (2 * pairs)) - 1), 0)  # backwards of the last unit behind its first
        last = (D - rest) * f + (D + more - rest) * (i + w) - np.where(units > 0, gap * f, 0.0)
        return full + np.where(rest > 0, last, 0.0)

    return bubble


def _inward(D: int, pairs: int, worker: int) -> int:
    """How far Chimera's worker is from the end of its pipelines: 1 there, D/2f in the middle."""
    place = worker % (D // pairs)
    return min(place, D // pairs - 1 - place) + 1


def _gaps(pairs: int, units: Any) -> Any:
    """How often a unit's bubble is paid: units of one pair of pipelines fit into each other, those of more do not."""
    return np.ones(np.shape(units)) if pairs == 1 else np.maximum(1.0, units)


def _both_ways(pairs: int) -> Stages:
    def stages(D: int, worker: int) -> tuple[int, ...]:
        steps = [i * D // pairs for i in range(pairs)]
        return tuple((worker - s) % D for s in steps) + tuple((D - 1 - (worker - s)) % D for s in steps)

    return stages


def _chimera(mode: str, pairs: int) -> ScheduleModel:
    def legal(D: int, N: Any) -> Any:
        return np.full(np.shape(N), D % 2 == 0 and (D // 2) % pairs == 0) & (np.asarray(N) >= 2 * pairs)

    rule = "chimera needs an even number of workers, pairs that divide half of it, and a micro-batch for each pipeline"
    stages = _both_ways(pairs)
    if mode == "direct":
        return ScheduleModel(
            name="chimera", mode=mode, pairs=pairs, stages=stages, legal=legal, rule=rule,
            bubble=_chimera_bubble(pairs),
            messages=lambda D, N: (3 * D - 5) + (2 * D - 4) * (N / D - 1),
            in_flight=lambda D, N, worker: np.minimum(N, D - D / (2 * pairs) + _inward(D, pairs, worker)),
        )  # fmt: skip
    if mode == "doubling":
        return ScheduleModel(
            name="chimera", mode=mode, pairs=pairs, stages=stages, legal=legal, rule=rule, round=2,
            bubble=lambda D, N, f, i, w: (
                np.where(_divides(2 * D, N), D / (2 * pairs) - 1, np.maximum(0.0, 0.75 * D / pairs - 1))
                * _gaps(pairs, N / (2 * D)) * (f + i + w)
            ),
            messages=lambda D, N: (3 * D - 5 if pairs == 1 else 3 * D / pairs - 3) * N / (2 * D),
            in_flight=lambda D, N, worker: np.minimum(N, 2 * D - D / (2 * pairs) + _inward(D, pairs, worker)),
        )  # fmt: skip
    return ScheduleModel(
        name="chimera", mode=mode, pairs=pairs, stages=stages, legal=legal, rule=rule, halves=True,
        bubble=lambda D, N, f, i, w: (
            ((D / (4 * pairs) - 0.5) * _gaps(pairs, N / D) + 0.3 * (np.ceil(np.asarray(N) / D) * D - N)) * (f + i + w)
        ),
        messages=lambda D, N: (1.5 * D - 2.5 if pairs == 1 else 1.5 * D / pairs - 1.5) * N / D,
        in_flight=lambda D, N, worker: np.minimum(N, D - D / (4 * pairs) + _inward(D, pairs, worker) / 2),
    )  # fmt: skip


@cache
def interleaved(chunks: int) -> ScheduleModel:
    """1F1B with so many stages for each worker."""
    return ScheduleModel(
        name="interleaved", chunks=chunks, stages=lambda D, worker: tuple(D * chunk + worker for chunk in range(chunks)),
        legal=_rounds, rule="interleaved needs micro-batches in equal rounds of at least the workers",
        bubble=lambda D, N, f, i, w: ((D - 1) + _shortfall(D, N)) * (f + i + w) / chunks,
        messages=lambda D, N: 2 * chunks * D - 2,
        in_flight=lambda D, N, worker: np.minimum(
            N, (2 * (D - 1 - worker) + (chunks - 1) * np.asarray(N) / np.maximum(1, np.asarray(N) // D) + 1) / chunks
        ),
    )  # fmt: skip


SHAPES: tuple[ScheduleModel, ...] = (
    ScheduleModel(
        name="gpipe",
        bubble=lambda D, N, f, i, w: (D - 1) * (f + i + w),
        messages=lambda D, N: 2 * (D - 1),
        in_flight=lambda D, N, worker: N,
    ),
    ScheduleModel(
        name="1f1b",
        bubble=lambda D, N, f, i, w: (D - 1) * (f + i + w),
        messages=lambda D, N: np.maximum(2 * (D - 1), 2 * (D - 1) * N / D + 2 * (D - 2)),
        in_flight=lambda D, N, worker: np.minimum(N, D - worker),
    ),
    interleaved(2),
    ScheduleModel(
        name="gems", stages=_both_ways(1),
        legal=lambda D, N: np.full(np.shape(N), D % 2 == 0) & (np.asarray(N) >= 2),
        rule="gems needs an even number of workers, and a micro-batch for each of its two pipelines",
        bubble=lambda D, N, f, i, w: (D - 1) * (N * (i + w) + f),
        messages=lambda D, N: (D - 1) * (N + 1),
        in_flight=lambda D, N, worker: np.minimum(N, 1),
    ),
    ScheduleModel(
        # Its waves do not fit into each other: past one round it waits as long as 1F1B, and holds more.
        name="hanayo", chunks=2, stages=lambda D, worker: (worker, 2 * D - 1 - worker),
        legal=lambda D, N: np.asarray(N) <= D,
        rule="hanayo with more micro-batches than workers waits as long as 1f1b, and holds more",
        bubble=lambda D, N, f, i, w: (D - 1) * (i + w) + (D - N) * f,
        messages=lambda D, N: 4 * D - 4 + np.minimum(2 * (N - 1), 4),
        in_flight=lambda D, N, worker: (N + np.minimum(N, 2 * worker + 1)) / 2,
    ),
    ScheduleModel(
        name="zb-h1", split=True, round=2, bubble=_split_wait,
        messages=lambda D, N: 4 * (D - 1),
        in_flight=lambda D, N, worker: np.minimum(N, D),
    ),
    ScheduleModel(
        name="zb-h2", split=True, round=2,
        bubble=lambda D, N, f, i, w: np.maximum(
            (D - 1) * f, (D - 1) * (f + i) - np.minimum(np.asarray(N) // 2, D - 1) * w
        ),
        messages=lambda D, N: np.where(N >= 2 * D - 1, D - 1, 2 * (D - 1)),
        in_flight=lambda D, N, worker: np.minimum(N, 2 * D - 1),
    ),
    ScheduleModel(
        name="zbv", split=True, round=2, chunks=2, stages=lambda D, worker: (worker, 2 * D - 1 - worker), bubble=_v_wait,
        messages=lambda D, N: 5 * D - 7,
        in_flight=lambda D, N, worker: np.minimum(N, D),
    ),
    ScheduleModel(
        name="dualpipe", split=True, round=2, stages=_both_ways(1),
        legal=lambda D, N: _twice(D, N) & (D % 2 == 0) & _divides(2, N),
        rule="dualpipe needs an even number of workers, and an even number of micro-batches of at least twice that",
        bubble=lambda D, N, f, i, w: (D // 2 - 1) * np.maximum(f, f + i - w),
        messages=lambda D, N: 2.5 * D - 3,
        in_flight=lambda D, N, worker: np.minimum(N, D + 1),
    ),
    ScheduleModel(
        name="dualpipev", split=True, round=2, chunks=2, stages=lambda D, worker: (worker, 2 * D - 1 - worker),
        legal=_twice, rule="dualpipev needs at least twice as many micro-batches as workers",
        bubble=lambda D, N, f, i, w: (D - 1) * np.maximum(f, f + i - w) / 2,
        messages=lambda D, N: 6 * D - 11,
        in_flight=lambda D, N, worker: np.minimum(N, D + 0.5),
    ),
    *(_chimera(mode, pairs) for mode in ("direct", "doubling", "halving") for pairs in (1, 2, 4)),
    ScheduleModel(
        name="chimera-zb", split=True, pairs=1, stages=_both_ways(1),
        legal=lambda D, N: (np.asarray(N) >= 2) & (D % 2 == 0),
        rule="chimera-zb needs an even number of workers, and two micro-batches",
        bubble=lambda D, N, f, i, w: np.maximum(
            (D / 2 - 1) * np.maximum(f, f + i - w), np.where(N < D, (D - 1) * (f + i) / 2, 0.0)
        ),
        messages=lambda D, N: (3 * D - 5) + 2.5 * D * np.maximum(0.0, N / D - 1),
        in_flight=lambda D, N, worker: np.minimum(N, D),
    ),
)  # fmt: skip

# A pipeline of one worker: micro-batches are gradient accumulation.
ONE_F_ONE_B = next(shape for shape in SHAPES if shape.name == "1f1b")
ALONE = ScheduleModel(
    name="1f1b",
    bubble=lambda D, N, f, i, w: 0.0 * f,
    messages=lambda D, N: 0.0,
    in_flight=lambda D, N, worker: np.minimum(N, 1),
)


def shapes(workers: int) -> tuple[ScheduleModel, ...]:
    return SHAPES if workers > 1 else (ALONE,)
