"""A small project with one of each file that Cubeloom reads, and what is loaded from each, as one value to compare."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from cubeloom import Grid
from cubeloom.base.settings import load, write
from cubeloom.launch import RankPool
from cubeloom.models import build
from cubeloom.models.weights import check_weights, save_weights, stored_values
from cubeloom.parallel import Batch, initial_values, materialise
from cubeloom.parallel.parameter import Block
from cubeloom.tools.convert import convert
from cubeloom.tools.convert.checkpoint_files import CheckpointWeights
from cubeloom.tools.convert.exporting import Export
from cubeloom.tools.convert.hugging_face_folder import HuggingFaceFolder
from cubeloom.tools.convert.importing import Import
from cubeloom.tools.sample.trained import Trained
from cubeloom.train.checkpoint import check_fits, checkpoints, index_of, newest, read_blocks, read_manifest
from cubeloom.train.checkpoint.shard import Shard
from cubeloom.train.data import Request, TokenFile, prepare
from cubeloom.train.job import Job
from cubeloom.train.job.settings import CheckpointSettings, DataSettings, ModelSettings, Source
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
    def weights(self) -> Path:
        return self.folder / "weights.safetensors"

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
    letters = [chr(97 + (7 * place * place) % 26) for place in range(4000)]
    (folder / "text.txt").write_text(
        "".join(letter + "\n\n" * (place % 50 == 0) for place, letter in enumerate(letters))
    )
    texts = Request(inputs=(folder / "text.txt",), tokenizer="bpe", vocabulary=260, separator="", validation=0.2)
    prepare(texts, project.tokens)
    ranks.run(2, train, job(project))
    convert(project.run, project.exported)
    with torch.device("meta"):
        model = build(job(project).source().config)  # type: ignore[attr-defined]
    save_weights(materialise(model, initial_values(model, 5, torch.float64)), project.weights)
    project.settings.write_text(write(job(project)))
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


# What is loaded from each kind of file, as a value: the same if and only if the same was loaded.


def load_checkpoint(project: Project) -> object:
    checkpoint = newest(project.run)
    assert checkpoint is not None
    weights = CheckpointWeights(checkpoint)
    index = index_of(checkpoint, read_manifest(checkpoint))
    wanted = {
        name: Shard.of(torch.empty(stored.shape, dtype=stored.dtype), stored.shape, (0,) * len(stored.shape))
        for name, stored in index.items()
    }
    read_blocks(checkpoint, index, wanted)
    return weights.progress, read_manifest(checkpoint), {name: each.local for name, each in wanted.items()}


def load_run(project: Project) -> object:
    """As sampling, converting and going on do."""
    made = load(Job, project.settings)
    shapes = {name: each.shape for name, each in made.skeleton().named_parameters()}
    check_fits(project.checkpoint, shapes, "AdamW")
    Export(project.checkpoint, CheckpointWeights(project.checkpoint), None, 10**9)
    Trained.of(project.run)
    return load_checkpoint(project)


def load_tokens(project: Project) -> object:
    file = TokenFile(project.tokens)
    streams = [file.stream(16, part="training"), file.stream(16, part="validation")]
    samples = [stream.samples(torch.arange(stream.windows)) for stream in streams]
    return file.meta, samples, file.document(1).tolist(), file.tokenizer.encode(["one text"])[0].tolist()


def load_exported(project: Project) -> object:
    work = Import(HuggingFaceFolder(project.exported), None)
    return work.config, {rule.ours: work._join(rule, work._source.read) for rule in work._rules}


def load_weights(project: Project) -> object:
    with torch.device("meta"):
        model = build(job(project).source().config)  # type: ignore[attr-defined]
    check_weights(project.weights, model)
    fill = stored_values(project.weights, model, torch.float64, torch.device("cpu"))
    whole = {name: (tuple(each.shape), (0,) * each.dim()) for name, each in model.named_parameters()}
    return {name: fill(name, Block(shape, offset, shape)) for name, (shape, offset) in whole.items()}


def load_settings(project: Project) -> object:
    made = load(Job, project.settings)
    made.skeleton()
    return write(made)


@dataclass(frozen=True)
class Kind:
    load: Callable[[Project], object]
    files: Callable[[Project], Iterable[Path]]
    checked: bool = True
    """Whether a change is found. What a user writes by hand has no checksum: another number is another wish."""


KINDS = {
    "checkpoint": Kind(load_checkpoint, lambda project: project.checkpoint.iterdir()),
    "manifest": Kind(load_checkpoint, lambda project: [project.checkpoint / "manifest.json"]),
    "tokens": Kind(load_tokens, lambda project: project.tokens.iterdir()),
    "exported": Kind(load_exported, lambda project: project.exported.iterdir()),
    "weights": Kind(load_weights, lambda project: [project.weights]),
    "settings": Kind(load_settings, lambda project: [project.settings], checked=False),
}


def mutated(content: bytes, other: bytes, draw: Random, mark: Path) -> bytes:
    """One way to damage a file; `other` is one to splice into it."""
    at, length = draw.randrange(len(content) + 1), draw.choice([1, 8, 100, len(content)])
    match draw.choice(
        ["flip", "flip", "flip many", "cut", "begin late", "splice", "insert", "repeat", "zero", "pickle"]
    ):
        case "flip":
            return _flipped(content, [draw.randrange(8 * len(content))])
        case "flip many":
            return _flipped(content, [draw.randrange(8 * len(content)) for _ in range(20)])
        case "cut":
            return content[:at]
        case "begin late":
            return content[at:]
        case "splice":
            begin = draw.randrange(len(other) + 1)
            return content[:at] + other[begin : begin + length] + content[at + length :]
        case "insert":
            return content[:at] + draw.randbytes(min(length, 100)) + content[at:]
        case "repeat":
            return content[:at] + content[at : at + length] * draw.choice([2, 3]) + content[at + length :]
        case "zero":
            return content[:at] + bytes(len(content[at : at + length])) + content[at + length :]
        case _:
            return draw.choice([*crafted(mark).values(), b"[" * 100_000, b"\x80\x04", b""])


def made_up(value: Any, draw: Random) -> Any:
    """JSON with another value somewhere in it, or without one."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {key: each for key, each in value.items() if key != name}
        return {**value, name: made_up(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        return [*value[:place], made_up(value[place], draw), *value[place + 1 :]]
    strange: list[Any] = [
        None,
        True,
        -1,
        0,
        10**30,
        1e308,
        float("nan"),
        "",
        "../x",
        "a\0b",
        [],
        [[]],
        {},
        {"a": 1},
        3,
        2.5,
    ]
    return draw.choice(strange)


def _flipped(content: bytes, bits: Iterable[int]) -> bytes:
    found = bytearray(content)
    for bit in bits:
        found[bit // 8] ^= 1 << bit % 8
    return bytes(found)


def same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second
