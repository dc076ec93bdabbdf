"""A stream gives the samples that preparing its documents would, and goes on from any state, on any grid."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.train.data import Bytes, Loader, Request, Streamed, Streaming, chunks, documents, prepare, tables
from cubeloom.train.data.documents import Files, hub
from cubeloom.train.data.packing import Packs
from cubeloom.train.data.reading import Reading
from cubeloom.train.data.stream import Stream
from cubeloom.train.job.settings import DataSettings, Source
from cubeloom.train.job.streams import stream_of

from .chats import TWO_TURNS, records
from .files import json_lines, parquet_file

TEXTS = [f"{number} " * (1 + 7 * number % 23) + "ä" for number in range(40)]
Rows = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind, in chunks of a few documents."""
    made = tmp_path_factory.mktemp("stream")
    json_lines(made / "a.jsonl", TEXTS[:15])
    parquet_file(made / "b.parquet", TEXTS[15:25], rows=4)
    table = pyarrow.table({"text": TEXTS[25:39]})
    with pyarrow.OSFile(str(made / "c.arrow"), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    (made / "d.txt").write_text(TEXTS[39])
    (made / "README.md").write_text("not of it")
    return made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 100)
    monkeypatch.setattr(tables, "ROWS", 3)
    monkeypatch.setattr(documents, "_AT_ONCE", 4)


def stream(folder: Path, **options: Any) -> Streaming:
    return Streaming(Files(folder, Reading()), Bytes(), 16, **options)


def rows(samples: Streaming, first: int, count: int) -> Rows:
    return samples.batch(torch.arange(first, first + count))


def same(ours: Rows, theirs: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def joined(times: int = 1) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All tokens, and where documents end."""
    found = [[*text.encode(), 256] for text in TEXTS] * times
    return np.concatenate(found), np.cumsum([len(each) for each in found])


@pytest.mark.parametrize("packing", [False, True])
def test_samples_are_those_of_the_documents_one_after_the_other_epoch_after_epoch(folder: Path, packing: bool) -> None:
    tokens, ends = joined(3)
    packs = Packs.of(ends, 16) if packing else None
    expected = Stream(tokens, 16, shuffled=False, packs=packs, end=256)
    count = expected.windows - 1  # of the last pack nobody knows whether more fits
    assert same(rows(stream(folder, packing=packing), 0, count), expected.batch(torch.arange(count)))


@given(at=st.integers(0, 200), forward=st.integers(0, 60), packing=st.booleans())
@settings(max_examples=12, deadline=None)
def test_any_state_goes_on_as_if_nothing_had_happened(folder: Path, at: int, forward: int, packing: bool) -> None:
    """Also where what is asked for first lies behind it, and the state has been JSON meanwhile."""
    whole = stream(folder, packing=packing)
    begun = [rows(whole, 0, at)] if at else []
    state = json.loads(json.dumps(whole.state(at)))
    again = stream(folder, packing=packing, state=state)
    assert same(rows(again, at + forward, 5), rows(whole, at + forward, 5))
    assert state["number"] <= at and (len(begun) == 0 or at < 20 or state["number"] > 0)


def test_a_loader_goes_on_on_another_grid(folder: Path) -> None:
    def read(grid: Grid, position: int, state: Any, steps: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The union of all ranks' shares, and what rank 0 says of its place."""
        found = [torch.zeros(12, 16, dtype=torch.long) for _ in range(steps)]
        said: dict[str, Any] = {}
        for rank in range(grid.world):
            share = grid.share(grid.coordinates(rank), 12)
            with Loader(stream(folder, state=state), 12, share, position) as loader:
                for whole in found:
                    whole[share] = next(loader)["tokens"]
                said = loader.progress if rank == 0 else said
        return found, said

    expected, _ = read(Grid(), 0, None, 9)
    first, said = read(Grid(data=2, z=3), 0, None, 4)
    said = json.loads(json.dumps(said))
    then, _ = read(Grid(z=4, y=2), said["position"], said["stream"], 5)
    assert all(torch.equal(one, other) for one, other in zip(first + then, expected, strict=True))
    assert said["stream"]["number"] > 0


def test_validation_is_other_documents(folder: Path) -> None:
    """The same each time, and those that `prepare` would keep."""
    share = Fraction(1, 4)
    tokens = [[*text.encode(), 256] for text in TEXTS]
    kept = [each for number, each in enumerate(tokens) if int((number + 1) * share) > int(number * share)]
    others = [each for each in tokens if each not in kept]
    for part, expected in (("training", others), ("validation", kept)):
        found = rows(stream(folder, validation=share, part=part), 0, 8)["tokens"].flatten().tolist()
        assert found == np.concatenate(expected)[: len(found)].tolist()
    with pytest.raises(UserError, match=r"there is no document for validation in .*stream"):
        rows(stream(folder, validation=Fraction(1, 1000), part="validation"), 0, 1)


def test_answers_alone_count_in_a_stream_too(tmp_path: Path) -> None:
    source = records(tmp_path / "a.jsonl", [{"messages": TWO_TURNS}, {"text": "some text"}] * 4)
    prepared = prepare(Request(inputs=(source,), validation=0), tmp_path / "out").file
    expected = replace(prepared.stream(16), shuffled=False)
    found = stream_of(Source(stream=str(source)), 16, False, "training")
    assert same(rows(found, 0, expected.windows), expected.batch(torch.arange(expected.windows)))
    plain = stream_of(Source(stream=str(source), field="text"), 16, False, "training")
    with pytest.raises(UserError, match=r"a.jsonl line 1 has no field 'text', but 'messages'"):
        rows(plain, 0, 1)


class Fetched:
    """As a streamed dataset of Hugging Face's: its state is that of the iteration that is under way."""

    made = 0

    def __init__(self, texts: list[str]) -> None:
        self._texts, self._at = texts, 0
        Fetched.made += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._at < len(self._texts):
            self._at += 1
            yield {"id": self._at, "text": self._texts[self._at - 1]}

    def state_dict(self) -> dict[str, Any]:
        return {"examples": {"index": self._at}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["examples"]["index"]


def test_any_iterable_with_a_state_is_a_stream(folder: Path) -> None:
    def streamed(**options: Any) -> Streaming:
        return Streaming(Streamed("mine", lambda: Fetched(TEXTS), Reading()), Bytes(), 16, **options)

    whole = streamed()
    assert same(rows(whole, 0, 40), rows(stream(folder), 0, 40))
    state = json.loads(json.dumps(whole.state(40)))
    assert state["where"]["record"] > 0
    assert same(rows(streamed(state=state), 40, 200), rows(stream(folder), 40, 200))


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Fetched when it is read, and not before; the package is not here, so that what is asked of it is all that is seen."""
    with pytest.raises(UserError, match=r"hf:org/name needs the package datasets: pip install 'cubeloom\[hub\]'"):
        stream_of(Source(stream="hf:org/name"), 16, False, "training")
    asked = []

    def load_dataset(*names: Any, **options: Any) -> Fetched:
        asked.append((names, options))
        if names[0] != "org/name":
            raise ConnectionError("no\nway")
        return Fetched(TEXTS)

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = stream_of(Source(stream="hf:org/name", subset="en", split="test"), 16, False, "training")
    assert not asked
    assert same(rows(found, 0, 30), rows(stream(folder), 0, 30))
    assert asked == [(("org/name", "en"), {"split": "test", "streaming": True})]
    module.__version__ = "3.6.0"  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="needs datasets 4 or newer, which run no script"):
        hub("org/name", None, "train", Reading())
    module.__version__ = "4.0.0"  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"^hf:other cannot be read: ConnectionError: no|^hf:other cannot be read: no"):
        next(hub("other", None, "train", Reading()).read({}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "has a folder, of tokens, or a stream"),
        ({"folder": Path("a"), "stream": "b"}, "has a folder, of tokens, or a stream"),
        ({"folder": Path("a"), "split": "test"}, "split is for a stream; a is a folder of tokens"),
        ({"stream": "a", "validation": 2.0}, "validation"),
    ],
)
def test_settings_of_sources(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Source(**options)


def test_streams_that_cannot_be_read(tmp_path: Path, folder: Path) -> None:
    for source, said in (
        (Source(stream=str(tmp_path / "nowhere")), "no file at"),
        (Source(stream=str(tmp_path)), "has no files of text"),
        (Source(stream=str(folder), tokenizer="bpe"), "a stream needs one that is there"),
        (Source(stream=str(folder), tokenizer=str(tmp_path / "none")), "no tokenizer at"),
        (Source(stream=str(folder), subset="en"), "subset is for a dataset of the hub"),
    ):
        with pytest.raises(UserError, match=said):
            stream_of(source, 16, False, "training")
    with pytest.raises(UserError, match="a stream does not mix with others"):
        DataSettings(sources=(Source(stream="a"), Source(folder=Path("b"))))
    state = stream(folder).state(0)
    with pytest.raises(
        UserError, match=r"the run stopped in the stream .* with samples of 16 tokens, and would go on with"
    ):
        Streaming(Files(folder, Reading()), Bytes(), 8, state=state)
    parquet.write_table(pyarrow.table({"txet": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has no field 'text', but 'txet'"):
        rows(stream(tmp_path), 0, 1)
