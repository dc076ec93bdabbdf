"""A folder of tokens holds the documents, and comes out the same however often its making was interrupted."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom.base.errors import UserError
from cubeloom.train.data import Request, TokenFile, chunks, prepare, tables
from cubeloom.train.data.encoded import is_validation
from cubeloom.train.data.writer import Writer

from .files import STORIES, contents, json_lines, parquet_file


def documents(file: TokenFile) -> list[str]:
    return [file.tokenizer.decode(file.document(number).tolist()) for number in range(file.meta.documents)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_documents_come_back(tmp_path: Path, tokenizer: str, suffix: str) -> None:
    path = tmp_path / f"stories.{suffix}"
    _ = json_lines(path, STORIES) if suffix == "jsonl" else parquet_file(path, STORIES, rows=2)
    done = prepare(Request(inputs=(path,), tokenizer=tokenizer, validation=0), tmp_path / "out")
    assert done.how == "written"
    assert documents(done.file) == [story for story in STORIES if story]
    assert int((done.file.tokens[:] == done.file.meta.end).sum()) == 4
    assert done.file.damaged() == []


def test_a_text_file_is_a_document_or_is_cut_at_a_separator(tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_bytes("one\r\n--\r\ntwo\n\nlines\n--\n--\nthree ü\n--".encode())
    for separator, expected in [
        (None, [text.read_bytes().decode()]),
        ("--", ["one\r\n", "two\n\nlines\n", "three ü\n"]),
        ("", ["one\r\n--\r\ntwo\n", "lines\n--\n--\nthree ü\n--"]),
    ]:
        request = Request(inputs=(text,), separator=separator)
        assert documents(prepare(request, tmp_path / "out", force=True).file) == expected


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_long_documents_are_whole_over_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(chunks, "CHUNK", size)
    texts = ["äöü€😀" * 9 + "\n\nend", "second\n"]
    paths = tuple(tmp_path / f"{index}.txt" for index in range(2))
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, "utf-8")
    assert documents(prepare(Request(inputs=paths), tmp_path / "out").file) == texts


def test_validation_is_the_same_share_of_documents_and_comes_last(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", [f"document {number}" for number in range(50)])
    meta = (file := prepare(Request(inputs=(source,), validation=0.1), tmp_path / "out").file).meta
    assert (meta.training.documents, meta.validation.documents) == (45, 5)
    assert documents(file)[45:] == [f"document {number}" for number in (9, 19, 29, 39, 49)]
    assert len(file.validation) == meta.validation.tokens == meta.tokens - len(file.training)


@pytest.mark.parametrize(("share", "tokens"), [(0.1, 100), (0.0, 0)])
def test_of_a_single_text_file_validation_is_the_end(tmp_path: Path, share: float, tokens: int) -> None:
    (tmp_path / "a.txt").write_text("x" * 900 + "y" * 99, "utf-8")
    file = prepare(Request(inputs=(tmp_path / "a.txt",), validation=share), tmp_path / "out").file
    assert (file.meta.training.tokens, file.meta.validation.tokens) == (1000 - tokens, tokens)
    assert file.meta.training.documents == 1 and file.meta.validation.documents == (tokens > 0)
    assert bytes(file.tokens[:-1].astype("u1")) == b"x" * 900 + b"y" * 99
    assert [int(end) for end in file.documents[:]] == ([900, 1000] if tokens else [1000])


def test_of_a_few_text_files_validation_is_the_end_of_the_text(tmp_path: Path) -> None:
    for name, count in (("a", 299), ("b", 499), ("c", 199)):
        (tmp_path / f"{name}.txt").write_text(name * count, "utf-8")
    request = Request(inputs=tuple(tmp_path / f"{name}.txt" for name in "abc"), validation=0.1)
    file = prepare(request, tmp_path / "out").file
    assert (file.meta.training.tokens, file.meta.validation.tokens) == (900, 100)
    assert (file.meta.training.documents, file.meta.validation.documents) == (3, 1)
    assert [int(end) for end in file.documents[:]] == [300, 800, 900, 1000]
    more = prepare(replace(request, validation=0.25), tmp_path / "more").file
    assert [int(end) for end in more.documents[:]] == [300, 750, 800, 1000]
    assert (more.meta.training.documents, more.meta.validation.documents) == (2, 2)
    few = prepare(replace(request, validation=0.05), tmp_path / "few").file
    assert few.meta.validation.documents == 0  # fifty tokens are not worth a cut


def test_an_error_of_the_disk_keeps_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of work, perhaps: the same command resumes."""
    monkeypatch.setattr(chunks, "CHUNK", 100)
    request, calls, plain = Request(inputs=sources(tmp_path), validation=0.2), [0], Writer.add
    whole = contents(prepare(request, tmp_path / "whole").file.folder)

    def fail(writer: Writer, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.EIO, "Input/output error")
        plain(writer, *arguments)

    monkeypatch.setattr(Writer, "add", fail)
    with pytest.raises(UserError, match="Input/output error; the same command resumes"):
        prepare(request, tmp_path / "out")
    done = prepare(request, tmp_path / "out")
    assert done.how == "resumed" and contents(done.file.folder) == whole


@given(share=st.fractions(0, Fraction(99, 100), max_denominator=1000), count=st.integers(0, 200))
@settings(max_examples=25, deadline=None)
def test_any_share_is_exact(share: Fraction, count: int) -> None:
    assert sum(is_validation(document, share) for document in range(count)) == int(count * share)


def sources(folder: Path) -> tuple[Path, ...]:
    long = folder / "long.txt"
    long.write_text("a line of text, ä\n" * 20, "utf-8")
    texts = [f"document {number}" for number in range(30)]
    return (
        json_lines(folder / "a.jsonl", texts),
        long,
        parquet_file(folder / "b.parquet", texts, rows=7),
        json_lines(folder / "c.ndjson", STORIES),
    )


class Interrupting:
    """In place of `os.fsync`: interrupts a run before the n-th, and saves no time for the disk."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, _: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@given(stops=st.lists(st.integers(1, 200), max_size=3), tokenizer=st.sampled_from(["bytes", "bpe"]))
@settings(max_examples=8, deadline=None)
def test_interrupted_runs_end_in_the_same_bytes(stops: list[int], tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(chunks, "CHUNK", 100)
        patch.setattr(tables, "ROWS", 3)
        patch.setattr(os, "fsync", Interrupting(0))
        request = Request(inputs=sources(folder), tokenizer=tokenizer, validation=0.2)
        expected = contents(prepare(request, folder / "whole").file.folder)
        for stop in stops:
            patch.setattr(os, "fsync", Interrupting(stop))
            try:
                prepare(request, folder / "broken")
            except KeyboardInterrupt:
                # Not there, or whole: after it has been put in its place, that alone is still to be made safe.
                assert not (folder / "broken").exists() or contents(folder / "broken") == expected
        patch.setattr(os, "fsync", Interrupting(0))
        done = prepare(request, folder / "broken")
        assert contents(done.file.folder) == expected
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("before_the_end", "there"), [(0, True), (1, False)])
def test_it_is_there_once_only_its_place_is_unsafe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_the_end: int, there: bool
) -> None:
    request = Request(inputs=sources(tmp_path))
    monkeypatch.setattr(os, "fsync", counting := Interrupting(0))
    expected = contents(prepare(request, tmp_path / "whole").file.folder)
    monkeypatch.setattr(os, "fsync", Interrupting(-counting.left - before_the_end))
    with pytest.raises(KeyboardInterrupt):
        prepare(request, tmp_path / "out")
    assert (tmp_path / "out").exists() is there
    monkeypatch.setattr(os, "fsync", Interrupting(0))
    done = prepare(request, tmp_path / "out")
    assert contents(done.file.folder) == expected and (done.how == "already there") is there


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 100)
    request = Request(inputs=sources(tmp_path))
    seen: list[int] = []

    def stop(what: str, done: int, total: int) -> None:
        seen.append(done)
        if what == "tokenizing" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(request, tmp_path / "out", progress=stop)
    again: list[tuple[str, int]] = []
    done = prepare(request, tmp_path / "out", progress=lambda what, done, _: again.append((what, done)))
    assert done.how == "resumed"
    assert next(done for what, done in again if what == "tokenizing") > seen[-1]


def test_what_another_request_left_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = sources(tmp_path)
    monkeypatch.setattr(os, "fsync", Interrupting(6))
    with pytest.raises(KeyboardInterrupt):
        prepare(Request(inputs=inputs, tokenizer="bpe", vocabulary=300), tmp_path / "out")
    done = prepare(Request(inputs=inputs), tmp_path / "out")
    assert done.how == "written"
    assert set(contents(done.file.folder)) == {"meta.json", "tokens.bin", "documents.bin", "checksums.bin"}


def test_a_finished_folder_is_left_alone_and_another_request_is_refused(tmp_path: Path) -> None:
    source, out = json_lines(tmp_path / "a.jsonl", STORIES), tmp_path / "out"
    prepare(Request(inputs=(source,)), out)
    before = out.stat().st_ino
    assert prepare(Request(inputs=(source,)), out).how == "already there"
    assert out.stat().st_ino == before
    with pytest.raises(UserError, match="another request"):
        prepare(Request(inputs=(source,), validation=0.5), out)
    json_lines(source, [*STORIES, "more"])
    with pytest.raises(UserError, match="another request"):
        prepare(Request(inputs=(source,)), out)
    assert prepare(Request(inputs=(source,)), out, force=True).file.meta.documents == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    hidden = tmp_path / ".out.partial"
    hidden.mkdir()
    source = json_lines(tmp_path / "a.jsonl", STORIES)
    with (hidden / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is preparing"):
            prepare(Request(inputs=(source,)), tmp_path / "out")
    assert hidden.exists()
    prepare(Request(inputs=(source,)), tmp_path / "out")


def test_an_interrupted_run_that_was_damaged_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(inputs=sources(tmp_path))
    monkeypatch.setattr(os, "fsync", Interrupting(12))
    with pytest.raises(KeyboardInterrupt):
        prepare(request, tmp_path / "out")
    (tmp_path / ".out.partial" / "tokens.bin").write_bytes(b"short")
    with pytest.raises(UserError, match="damaged"):
        prepare(request, tmp_path / "out")
    assert prepare(request, tmp_path / "out").how == "written"
