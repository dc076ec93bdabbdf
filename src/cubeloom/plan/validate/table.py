"""Measured training steps from a CSV file, as vTrain publishes them: what was run, and apart from it how long it took."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cubeloom.base.errors import UserError

Floats = NDArray[np.float64]

COLUMNS = {
    "devices": "# GPUs",
    "batch": "global batch",
    "microbatch": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "sequence": "sequence length",
    "tensor": "tensor parallelism",
    "data": "data parallelism",
    "pipe": "pipeline parallelism",
}
TIME = "iteration time (ms)"


@dataclass(frozen=True)
class Runs:
    """GPTs trained as Megatron-LM does, one entry of each array a run. There is no time in here."""

    devices: Floats
    batch: Floats  # samples of a step
    microbatch: Floats
    hidden: Floats
    heads: Floats
    layers: Floats
    sequence: Floats
    tensor: Floats  # ranks of the axis, innermost
    data: Floats
    pipe: Floats  # outermost

    def __len__(self) -> int:
        return len(self.devices)

    def work(self) -> list[tuple[float, ...]]:
        """What each run computes, on how many devices: runs of the same work differ only in how they are cut."""
        return list(
            zip(
                *(
                    getattr(self, name).tolist()
                    for name in ("hidden", "heads", "layers", "sequence", "batch", "devices")
                ),
                strict=True,
            )
        )


def read_runs(path: Path) -> Runs:
    """What was run. The column of times is not looked at."""
    columns = _read(path, tuple(COLUMNS.values()))
    runs = Runs(**{name: columns[title] for name, title in COLUMNS.items()})
    _refuse(runs.tensor * runs.data * runs.pipe != runs.devices, path, "its parallelisms do not multiply to its # GPUs")
    _refuse(
        runs.batch % (runs.data * runs.microbatch) != 0, path, "its global batch is not made of whole micro-batches"
    )
    return runs


def read_times(path: Path) -> Floats:
    """How long each step took, in seconds."""
    return _read(path, (TIME,))[TIME] / 1e3


def _read(path: Path, titles: tuple[str, ...]) -> dict[str, Floats]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [title for title in titles if title not in (reader.fieldnames or ())]
            if missing:
                found = ", ".join(reader.fieldnames or ()) or "none"
                raise UserError(f"{path} has no column {missing[0]!r}; its columns are {found}")
            lines = list(reader)
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not lines:
        raise UserError(f"{path} has no rows below its header")
    return {
        title: np.array([_number(line[title], title, f"{path}, row {row}") for row, line in enumerate(lines, 1)])
        for title in titles
    }


def _number(text: str | None, title: str, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise UserError(f"{where}: {title} = {text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise UserError(f"{where}: {title} = {text!r} should be a finite number above 0")
    return value


def _refuse(wrong: NDArray[np.bool_], path: Path, why: str) -> None:
    if wrong.any():
        raise UserError(f"{path}, row {int(wrong.argmax()) + 1}: {why}")


assert set(COLUMNS) == {field.name for field in fields(Runs)}
