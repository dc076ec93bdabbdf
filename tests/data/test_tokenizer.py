"""Tokens give the text back, and settings in a tokenizer file do not change the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom.base.errors import UserError
from cubeloom.train.data import Bytes, Request, Tokenizer, prepare
from cubeloom.train.data.hugging_face import END, HuggingFace, train

from .files import STORIES, json_lines


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train(iter(STORIES), 280), "utf-8")
    return path


@given(texts=st.lists(st.text(max_size=30), max_size=3))
@settings(max_examples=20, deadline=None)
def test_every_text_comes_back(file: Path, texts: list[str]) -> None:
    tokenizers: list[Tokenizer] = [Bytes(), HuggingFace(file)]
    for tokenizer in tokenizers:
        encoded = tokenizer.encode(texts)
        assert [tokenizer.decode(tokens.tolist()) for tokens in encoded] == texts
        assert all(0 <= token < tokenizer.vocabulary and token != tokenizer.end for row in encoded for token in row)


def test_training_is_deterministic(file: Path) -> None:
    assert file.read_text("utf-8") == train(iter(STORIES), 280)
    assert HuggingFace(file).vocabulary == 280


def test_settings_of_a_models_training_are_not_used(tmp_path: Path, file: Path) -> None:
    known = json.loads(file.read_text("utf-8"))
    known["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    known["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": END,
    }  # fmt: skip
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(known))
    plain, other = HuggingFace(file), HuggingFace(changed)
    assert other.encode(["a longer text"])[0].tolist() == plain.encode(["a longer text"])[0].tolist()
    assert other.fingerprint != plain.fingerprint


def test_the_end_is_found_or_named(tmp_path: Path, file: Path) -> None:
    assert HuggingFace(file).end == 0
    assert HuggingFace(file, "a").decode([HuggingFace(file, "a").end]) == ""
    other = tmp_path / "other.json"
    other.write_text(file.read_text("utf-8").replace(END, "<stop>"), "utf-8")
    with pytest.raises(UserError, match=r"none of .* name one of its tokens with --end"):
        HuggingFace(other)
    assert HuggingFace(other, "<stop>").end == 0
    with pytest.raises(UserError, match="no token '<stpo>'"):
        HuggingFace(other, "<stpo>")


def test_a_tokenizer_file_is_kept_with_the_tokens(tmp_path: Path, file: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", STORIES)
    made = prepare(Request(inputs=(source,), tokenizer=str(file), end="a"), tmp_path / "out").file
    assert (made.folder / "tokenizer.json").read_bytes() == file.read_bytes()
    assert made.tokenizer.end == made.meta.end == HuggingFace(file, "a").end
    assert made.tokenizer.fingerprint == made.meta.tokenizer


@pytest.mark.parametrize("content", [b"\xff", b"{}", b"no"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a tokenizer file"):
        HuggingFace(path)
