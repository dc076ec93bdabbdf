"""What cannot work is refused in one sentence, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cubeloom.base.errors import UserError
from cubeloom.train.data import Request, chunks, prepare
from cubeloom.train.data.hugging_face import train

from .files import STORIES, json_lines, parquet_file

BAD: list[tuple[str, bytes, str]] = [
    (
        "a.jsonl",
        b'{"text": "fine"}\n\n{"text": "bro\n',
        "line 3 is not JSON: Unterminated string starting at (column 10)",
    ),
    ("a.jsonl", b'{"text": "fine"}\n["list"]\n', "line 2 is not a JSON object"),
    ("a.jsonl", b'{"txt": "x", "id": 1}\n', "line 1 has no field 'text', but 'txt', 'id'; did you mean --field txt"),
    ("a.jsonl", b'{"text": 7}\n', "line 1: field 'text' is not text but int"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: field 'text' holds half of a character"),
    ("a.jsonl", b'{"text": ""}\n\n', "there is no text in"),
    ("a.jsonl", b'{"text": "\xff"}\n', "is not UTF-8: byte 10 is 0xff"),
    ("a.txt", b"", "there is no text in"),
    ("a.txt", b"ab\n" * 10 + b"\xc3(", "is not UTF-8: byte 30 is 0xc3"),
    ("a.txt", b"\x80" * 9, "is not UTF-8: byte 0 is 0x80"),
    ("a.parquet", b"PAR1 not really", "is not a readable Parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, message: str, tokenizer: str
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 8)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        prepare(Request(inputs=(tmp_path / name,), tokenizer=tokenizer), tmp_path / "out")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "a.parquet", STORIES, rows=2)
    with pytest.raises(UserError, match="has no field 'txet', but 'text'; did you mean --field text"):
        prepare(Request(inputs=(path,), field="txet"), tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ()}, "no input"),
        ({"inputs": (Path("nowhere.txt"),)}, "no file at nowhere.txt"),
        ({"inputs": (Path("/tmp"),)}, "/tmp is a folder"),
        ({"validation": 1.0}, "at least 0 and below 1"),
        ({"tokenizer": "bpe", "vocabulary": 100}, "--vocab must be from 257 to 16,777,216, got 100"),
        ({"tokenizer": "bpe", "vocabulary": 10**11}, "--vocab must be from 257 to 16,777,216"),
        ({"vocabulary": 300}, "--vocab is for --tokenizer bpe"),
        ({"end": "</s>"}, "--end is for a tokenizer file"),
        ({"separator": "a\nb"}, "--separator is one line"),
        ({"tokenizer": "bpee"}, "no tokenizer at bpee"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = json_lines(tmp_path / "a.jsonl", STORIES)
    with pytest.raises(UserError, match=message):
        prepare(Request(**{"inputs": (source,), **options}), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_tokenizer_file_is_named_as_it_was_given(tmp_path: Path) -> None:
    source, tokenizer = json_lines(tmp_path / "a.jsonl", STORIES), tmp_path / "mine.json"
    tokenizer.write_text("{}")
    with pytest.raises(UserError, match=f"^{tokenizer} is not a tokenizer file"):
        prepare(Request(inputs=(source,), tokenizer=str(tokenizer)), tmp_path / "out")
    tokenizer.write_text(train(iter(STORIES), 280), encoding="utf-8")
    with pytest.raises(UserError, match=f"^{tokenizer} has no token '</end>'"):
        prepare(Request(inputs=(source,), tokenizer=str(tokenizer), end="</end>"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "mine.json"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    request = Request(inputs=(json_lines(tmp_path / "a.jsonl", STORIES),))
    with pytest.raises(UserError, match="there is no folder"):
        prepare(request, tmp_path / "missing" / "out")
    with pytest.raises(UserError, match=r"cannot write /proc/out"):
        prepare(request, Path("/proc/out"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    for out in (foreign, foreign / "thesis.tex"):
        with pytest.raises(UserError, match="is not a folder of tokens"):
            prepare(request, out, force=True)
    assert (foreign / "thesis.tex").read_text() == "precious"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    request = Request(inputs=(json_lines(tmp_path / "a.jsonl", STORIES),))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="is full; with more room the same command resumes"):
        prepare(request, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    prepare(request, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]
