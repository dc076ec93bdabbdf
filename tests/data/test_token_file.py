"""Damaged and foreign folders are told apart from good ones, with a sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cubeloom.data import Request, TokenFile, prepare
from cubeloom.data.meta import token_dtype
from cubeloom.errors import UserError

from .files import STORIES, json_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(Request(inputs=(json_lines(tmp_path / "a.jsonl", STORIES),)), tmp_path / "out").file.folder


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        known = json.loads((folder / "meta.json").read_text())
        change(known)
        (folder / "meta.json").write_text(json.dumps(known))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "meta.json").unlink(), "is not a folder of tokens"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is damaged: it is not JSON"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "of another program"),
        (edit(lambda meta: meta.update(format="other")), "of another program"),
        (edit(lambda meta: meta.update(version=2)), "is of version 2 of the format"),
        (edit(lambda meta: meta.pop("end")), "it lacks something"),
        (edit(lambda meta: meta.update(dtype="uint32")), "257 tokens are not kept as uint32"),
        (lambda folder: (folder / "tokens.bin").unlink(), r"tokens.bin is damaged: it has 0 bytes and should have \d+"),
        (lambda folder: (folder / "documents.bin").write_bytes(b"1234567"), "documents.bin is damaged: it has 7 bytes"),
    ],
)
def test_what_is_not_whole_is_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message):
        TokenFile(folder)


def test_a_token_that_the_vocabulary_does_not_have_is_not_handed_on(folder: Path) -> None:
    """As a model would look it up where nothing is. The others are what they were."""
    tokens = np.memmap(folder / "tokens.bin", np.uint16, mode="r+")
    tokens[3] = 4711
    tokens.flush()
    stream = TokenFile(folder).stream(8)
    where = stream.order(torch.arange(stream.windows)).tolist().index(0)
    with pytest.raises(
        UserError, match=r"out is damaged: it has a token 4711, and a vocabulary of 257; `cubeloom data"
    ):
        stream.samples(torch.tensor([where]))
    stream.samples(torch.tensor([number for number in range(stream.windows) if number != where]))


def test_a_changed_byte_is_found_when_asked_for(folder: Path) -> None:
    path = folder / "tokens.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    assert TokenFile(folder).damaged() == ["tokens.bin"]


def test_tokens_are_as_wide_as_they_need_to_be() -> None:
    assert [token_dtype(size).itemsize for size in (257, 65536, 65537)] == [2, 2, 4]


def test_streams_of_the_parts(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", ["0123456789"] * 10)
    file = prepare(Request(inputs=(source,), validation=0.2), tmp_path / "out").file
    assert file.stream(4).windows == (8 * 11 - 1) // 4
    assert file.stream(4, part="validation").order(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="22 tokens for validation: too few for a sequence of 22"):
        file.stream(22, part="validation")
    assert isinstance(file.tokens, np.memmap)
