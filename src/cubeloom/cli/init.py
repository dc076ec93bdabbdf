"""`cubeloom init`: a commented settings file that runs, from questions or from options."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from cubeloom.base.dtypes import Trained
from cubeloom.base.errors import UserError
from cubeloom.base.files import write_asked
from cubeloom.base.grid import Grid
from cubeloom.base.settings import commented, load
from cubeloom.comm.kinds import CPU, Kind, gpus_seen
from cubeloom.models.named import kind_of
from cubeloom.models.presets import PRESETS
from cubeloom.train.data.meta import META, Meta
from cubeloom.train.job.job import Job

_SEQUENCE = 128  # the default is at most this
_ROUND = 64  # a vocabulary rounded to a multiple of this divides over most grids
_QUESTIONS = {
    "model": "Model: a preset (`cubeloom models`), a Hugging Face folder, or file.py:function",
    "data": "Data: a folder of tokens, a text file, or nothing for random samples",
    "device": "Device: cpu or cuda",
    "grid": "Grid of ranks, as z=2,y=2 (z: FSDP, y: tensor parallelism, data, pipe)",
    "steps": "Steps",
    "batch": "Samples in a step, over all ranks",
    "folder": "Folder of the run",
}


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write a settings file that `cubeloom train` runs: the chosen settings, and all others as comments.

    On a terminal it asks for settings without an option; elsewhere, or with --yes, these have their defaults.
    """

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("cubeloom.toml")
    """The file to write."""
    model: str | None = None
    """A preset, such as gpt2; a Hugging Face folder; or file.py:function. By default gpt-tiny."""
    data: Path | None = None
    """A token folder that `cubeloom data prepare` wrote, or a text file or a folder of them, which is tokenized during
    training; by default random samples, whose loss does not fall.
    """
    device: Kind | None = None
    """By default GPUs if this machine has some, otherwise cores."""
    grid: str | None = None
    """Such as z=2,y=2; by default z over all GPUs, or one rank on the CPU."""
    schedule: str | None = None
    """The pipeline schedule, if the grid has a pipeline: by default 1f1b."""
    steps: int | None = None
    """By default 100."""
    batch: int | None = None
    """Samples in a step over all ranks; by default 8, or one per rank of data and z if there are more of those."""
    sequence: int | None = None
    """Tokens per sample; by default what the model takes, and at most 128."""
    lr: float | None = None
    """The highest learning rate: by default 1e-3."""
    dtype: Trained | None = None
    """By default bfloat16 on GPUs, and float32 on the CPU."""
    folder: Path | None = None
    """The folder of the run; by default runs/ and the name of the file."""
    yes: Annotated[bool, tyro.conf.arg(aliases=["-y"])] = False
    """Ask nothing."""
    force: bool = False
    """Replace an existing file."""

    def __call__(self) -> int:
        if self.output.exists() and not self.force:
            raise UserError(f"{self.output} exists: give another name with -o, or --force to replace it")
        chosen = self if self.yes or not sys.stdin.isatty() else self._asked()
        text = commented(Job, chosen.settings(), f"Written by `cubeloom init`; `cubeloom train {self.output}` runs it.")
        write_asked(self.output, text)
        try:
            self._check()
        except UserError:
            self.output.unlink()
            raise
        print(f"{self.output}: `cubeloom train {self.output}` runs it, `cubeloom settings` says what else can be set")
        return 0

    def _check(self) -> None:
        from cubeloom.train.job import check  # checks the layout of the whole job, which needs torch

        job = load(Job, self.output)
        check(job, device_here=False)

    def _asked(self) -> Init:
        """With an answer to each question that no option answers; an empty answer takes the default shown."""
        found: Init = self
        for name, question in _QUESTIONS.items():
            if getattr(found, name) is not None:
                continue
            shown = found._default(name)
            answer = input(f"{question} [{shown}]: ").strip()
            if answer:
                found = replace(found, **{name: _read(name, answer)})
        return found

    def _default(self, name: str) -> Any:
        match name:
            case "model":
                return "gpt-tiny"
            case "data":
                return ""
            case "device":
                return gpus_seen()[0]
            case "grid":
                return Grid(z=max(1, gpus_seen()[1])) if self._given("device") != CPU else Grid()
            case "steps":
                return 100
            case "batch":
                grid = self._grid()
                return -(-8 // (grid.data * grid.z)) * grid.data * grid.z
            case "folder":
                return Path("runs", self.output.stem)
            case "dtype":
                return "float32" if self._given("device") == CPU else "bfloat16"
        return None

    def _given(self, name: str) -> Any:
        value = getattr(self, name)
        return self._default(name) if value is None else value

    def _grid(self) -> Grid:
        given = self._given("grid")
        return given if isinstance(given, Grid) else Grid.parse(given)

    def settings(self) -> dict[str, Any]:
        """The contents of the file, by setting name. Raises UserError for invalid settings."""
        grid = self._grid()
        found = {
            "folder": self._given("folder"),
            "steps": self._given("steps"),
            "dtype": self._given("dtype"),
            "device": self._given("device"),
            "model.name": self._given("model"),
            "batch.samples": self._given("batch"),
            "batch.sequence": self._sequence(),
            **{f"grid.{axis}": size for axis, size in grid.sizes.items() if size > 1},
            **self._data(),
            "rate.peak": 1e-3 if self.lr is None else self.lr,
        }
        if grid.pipe > 1 or self.schedule is not None:
            found["schedule.name"] = self.schedule or "1f1b"
        return found

    def _sequence(self) -> int:
        name = self._given("model")
        if self.sequence is not None:
            return self.sequence
        if kind_of(name) != "preset":
            return _SEQUENCE
        return min(_SEQUENCE, getattr(PRESETS[name], "positions", 1))

    def _data(self) -> dict[str, Any]:
        if self.data is None:
            return {}
        if not self.data.exists():
            raise UserError(f"--data {self.data}: there is no such file or folder")
        if not (self.data / META).exists():
            streamed = {"stream": str(self.data)}
            return {"data.sources": [streamed], "data.vocab_multiple": _ROUND}
        found = {"data.sources": [{"folder": str(self.data)}], "data.vocab_multiple": _ROUND}
        batches = Meta.read(self.data).validation.tokens // (self._sequence() * self._given("batch")) - 1
        if batches > 0:
            found |= {"evaluation.every": max(1, self._given("steps") // 10), "evaluation.batches": min(4, batches)}
        return found


def _read(name: str, answer: str) -> Any:
    if name in ("steps", "batch"):
        if not answer.isdecimal():
            raise UserError(f"{name} is a whole number, got {answer!r}")
        return int(answer)
    return Path(answer) if name in ("data", "folder") else answer
