"""A small project with one of each file that Cubeloom reads, and what is loaded from each, as one value to compare."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cubeloom import Grid
from cubeloom.convert import convert
from cubeloom.cube import Batch
from cubeloom.data import Request, prepare
from cubeloom.job import Job
from cubeloom.job.settings import CheckpointSettings, DataSettings, ModelSettings, Source
from cubeloom.launch import RankPool
from cubeloom.settings import write
from cubeloom.train.checkpoint import checkpoints
from cubeloom.train.loop import train


@dataclass(frozen=True)
class Project:
    """`run` is of two ranks, and trained on `tokens`; `exported` is its model as a Hugging Face folder."""

    folder: Path

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def exported(self) -> Path:
        return self.folder / "exported"

    @property
    def settings(self) -> Path:
        return self.folder / "job.toml"

    @property
    def checkpoint(self) -> Path:
        return checkpoints(self.run / "checkpoints")[-1]

    def copy(self, to: Path) -> Project:
        """With the settings of a run of one rank that would go on there, or begin with its weights."""
        shutil.copytree(self.folder, to)
        made = replace(job(Project(to)), steps=4, grid=Grid())
        start = replace(made.model, start=to / "run")
        (to / "job.toml").write_text(write(made))
        (to / "start.toml").write_text(write(replace(made, folder=to / "new", model=start)))
        return Project(to)


def job(project: Project) -> Job:
    return Job(
        folder=project.run,
        steps=2,
        dtype="bfloat16",
        grid=Grid(y=2),
        model=ModelSettings(preset="gpt-tiny", vocab=260, positions=16, hidden=16, layers=1, heads=2),
        batch=Batch(4, 16),
        data=DataSettings(sources=(Source(folder=project.tokens),)),
        checkpoint=CheckpointSettings(every=2),
    )


def make(ranks: RankPool, folder: Path) -> Project:
    project = Project(folder)
    (folder / "text.txt").write_text("".join(chr(97 + (7 * place * place) % 26) for place in range(4000)))
    prepare(Request(inputs=(folder / "text.txt",)), project.tokens)
    ranks.run(2, train, job(project))
    convert(project.run, project.exported)
    return project


class Marks:
    """A pickle of one leaves a file, as it would run any command."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def crafted(mark: Path) -> dict[str, bytes]:
    """What executes when it is unpickled: plain, and in the file of `torch.save`."""
    saved = mark.with_name("saved.pt")
    torch.save(Marks(mark), saved)
    content = saved.read_bytes()
    saved.unlink()
    return {"pickle": pickle.dumps(Marks(mark)), "torch.save": content}
