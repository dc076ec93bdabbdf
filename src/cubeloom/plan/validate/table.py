"""Measured training steps from a CSV file: what was run, and apart from it how long it took.

Two kinds of files: as vTrain publishes them, and with one column for each thing that a source may say of a run, in which an
empty cell means that it does not.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cubeloom.base.errors import UserError
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.plan.model.decoder import DecoderSizes

Floats = NDArray[np.float64]
Row = Mapping[str, str]

VTRAIN = {
    "devices": "# GPUs",
    "global_batch": "global batch",
    "micro_batch": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "sequence": "sequence length",
    "tensor": "tensor parallelism",
    "data": "data parallelism",
    "pipeline": "pipeline parallelism",
}
VTRAIN_TIME = "iteration time (ms)"
TIME, RATE = "step_s", "tokens_per_s_per_device"
NEEDED = ("system", "device", "devices", "layers", "hidden", "heads", "sequence", "global_batch")


class WrongCell(UserError):
    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Skipped(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was run. There is no time in here."""

    sizes: DecoderSizes
    cluster: Cluster  # with the software that ran on it
    dtype: Dtype
    devices: int
    tensor: int
    data: int
    shards: int  # ranks over which weights are cut: the axis z
    kept: bool  # weights that were gathered stay until the backward
    pipe: int
    chunks: int
    sharded: bool  # activations at rest, over tensor
    microbatch: int
    batch: int
    wide: bool  # gradients in float32
    recompute: tuple[Recompute, ...]  # one, or those that are tried, in this order, until one fits
    share: float = 1.0  # of the blocks, in which that is computed again
    assumed: tuple[str, ...] = field(default=())  # what the source does not say

    @property
    def microbatches(self) -> int:
        return max(1, self.batch // (self.microbatch * self.data * self.shards))

    @property
    def costed(self) -> tuple[object, ...]:
        """What the costs of the model's pieces follow from, beside axes and micro-batch."""
        return self.sizes, self.cluster, self.dtype, self.wide

    @property
    def scheduled(self) -> tuple[object, ...]:
        return self.pipe, self.chunks, self.microbatches, self.recompute, self.share

    @property
    def work(self) -> tuple[object, ...]:
        """What it computes, on which machine: runs of the same work differ only in how they are cut."""
        s = self.sizes
        machine = self.cluster.device.name, self.cluster.software.products, self.devices
        return s.layers, s.hidden, s.heads, s.mlp, s.sequence, self.batch, *machine

    def __str__(self) -> str:
        s = self.sizes
        return (
            f"{s.layers}x{s.hidden}, {self.batch}x{s.sequence} tokens, {self.devices} {self.cluster.device.name}, "
            f"pipe={self.pipe},data={self.data},z={self.shards},y={self.tensor}"
        )


def read_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            wanted = tuple(VTRAIN.values()) if VTRAIN["devices"] in names else NEEDED
            missing = [name for name in wanted if name not in names]
            if missing:
                found = ", ".join(names) or "none"
                raise UserError(f"{path} has no column {missing[0]!r}; its columns are {found}")
            rows = [{name: (text or "").strip() for name, text in row.items() if name} for row in reader]
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise UserError(f"{path} has no rows below its header")
    return rows


def without_times(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows as a prediction sees them: whatever follows from a measured time is left out."""
    timed = {VTRAIN_TIME, TIME, RATE, "tflops_per_device", "mfu", "memory_gb"}
    return [{name: text for name, text in row.items() if name not in timed} for row in rows]


def seconds_of(row: Row, where: str) -> float | None:
    """How long a step took; None where the row does not say."""
    if row.get(VTRAIN_TIME):
        return number(row, VTRAIN_TIME, where) / 1e3
    if row.get(TIME):
        return number(row, TIME, where)
    if all(row.get(name) for name in (RATE, "devices", "global_batch", "sequence")):
        tokens = number(row, "global_batch", where) * number(row, "sequence", where)
        return tokens / (number(row, RATE, where) * number(row, "devices", where))
    return None


def number(row: Row, name: str, where: str) -> float:
    text = row.get(name, "")
    try:
        value = float(text)
    except ValueError:
        raise WrongCell(f"{where}: {name} = {text!r} is not a number", name) from None
    if not 0 < value < float("inf"):
        raise WrongCell(f"{where}: {name} = {text!r} should be a finite number above 0", name)
    return value
