"""Damaged and foreign folders are told apart from good ones, with a sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cubeloom.base.errors import UserError
from cubeloom.base.files import write_sealed
from cubeloom.train.data import Request, TokenFile, prepare
from cubeloom.train.data.checked import PART
from cubeloom.train.data.meta import token_dtype

from .files import STORIES, json_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(Request(inputs=(json_lines(tmp_path / "a.jsonl", STORIES),)), tmp_path / "out").file.folder


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        known = json.loads((folder / "meta.json").read_text())
        change(known)
        del known["checksum"]
        write_sealed(folder / "meta.json", known)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "meta.json").unlink(), "is not a folder of tokens"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is damaged: it is not JSON"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "is damaged: it should be a JSON object"),
        (edit(lambda meta: meta.update(format="other")), "of another program"),
        (
            edit(lambda meta: meta.update(version=1)),
            "is of version 1 of the format, and this program reads version 2; prepare",
        ),
        (edit(lambda meta: meta.pop("end")), "it lacks something"),
        (edit(lambda meta: meta.update(end="x")), "it lacks something"),
        (edit(lambda meta: meta["training"].update(tokens=-1)), "it lacks something"),
        (edit(lambda meta: meta.update(end=257)), "it lacks something"),
        (lambda folder: flip(folder / "meta.json", b'"end": 256'), "meta.json is damaged: it is not what was written"),
        (lambda folder: flip(folder / "checksums.bin"), "checksums.bin is damaged: it is not what was written"),
        (edit(lambda meta: meta.update(dtype="uint32")), "257 tokens are not kept as uint32"),
        (lambda folder: (folder / "tokens.bin").unlink(), r"tokens.bin is damaged: it has 0 bytes and should have \d+"),
        (lambda folder: (folder / "documents.bin").write_bytes(b"1234567"), "documents.bin is damaged: it has 7 bytes"),
    ],
)
def test_what_is_not_whole_is_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message):
        TokenFile(folder)


def flip(file: Path, after: bytes = b"") -> None:
    """The last bit of the first byte, or of the byte that these end with."""
    data = bytearray(file.read_bytes())
    data[max(0, data.index(after) + len(after) - 1)] ^= 1
    file.write_bytes(data)


def test_a_changed_byte_is_found_where_it_is_read(tmp_path: Path) -> None:
    """The parts without it are what they were, and are read."""
    source = json_lines(tmp_path / "a.jsonl", ["0123456789" * 5000])
    folder = prepare(Request(inputs=(source,), validation=0), tmp_path / "out").file.folder
    whole = TokenFile(folder).tokens[:]
    flip(folder / "tokens.bin")
    file = TokenFile(folder)
    stream = file.stream(1000)
    where = stream.order(torch.arange(stream.windows)).tolist()
    good = [number for number, window in enumerate(where) if window >= PART // 2 // 1000 + 1]
    stream.samples(torch.tensor(good))
    said = r"tokens.bin is damaged: between bytes 0 and 32,768 it is not what was written; `cubeloom data show .*out` checks"
    with pytest.raises(UserError, match=said):
        stream.samples(torch.tensor([where.index(3)]))
    with pytest.raises(UserError, match=said):
        file.document(0)
    assert (file.training[PART:] == whole[PART:]).all()
    assert file.damaged() == ["tokens.bin"]


def test_a_token_that_the_vocabulary_does_not_have_is_not_handed_on(folder: Path) -> None:
    """As a model would look it up where nothing is: in a file that no program of ours wrote."""
    stream = replace(TokenFile(folder).stream(8), vocabulary=99)
    with pytest.raises(UserError, match=r"out is damaged: it has a token \d+, and a vocabulary of 99; `cubeloom data"):
        stream.samples(torch.arange(stream.windows))


def test_tokens_are_as_wide_as_they_need_to_be() -> None:
    assert [token_dtype(size).itemsize for size in (257, 65536, 65537)] == [2, 2, 4]


def test_streams_of_the_parts(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", ["0123456789"] * 10)
    file = prepare(Request(inputs=(source,), validation=0.2), tmp_path / "out").file
    assert file.stream(4).windows == (8 * 11 - 1) // 4
    assert file.stream(4, part="validation").order(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="22 tokens for validation: too few for a sequence of 22"):
        file.stream(22, part="validation")
