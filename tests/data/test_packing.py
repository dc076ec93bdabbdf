"""Packed samples are whole documents, and say where each begins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom.train.data import Request, Stream, packing, prepare
from cubeloom.train.data.packing import Packs
from cubeloom.train.data.stream import IGNORED, NO_DOCUMENT

from .files import json_lines

END = 0


def packed(lengths: list[int], sequence: int, shuffled: bool = False) -> Stream:
    """Documents of numbers that are there once each, but for their ends."""
    tokens = np.arange(1, sum(lengths) + 1)
    ends = np.cumsum(lengths)
    tokens[ends - 1] = END
    return Stream(tokens, sequence, shuffled=shuffled, packs=Packs.of(ends, sequence), end=END)


@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=20), sequence=st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_every_token_but_the_first_of_a_document_is_a_target_once(lengths: list[int], sequence: int) -> None:
    stream = packed(lengths, sequence)
    batch = stream.batch(torch.arange(stream.windows))
    targets = batch["targets"][batch["targets"] != IGNORED].tolist()
    first = np.cumsum([0, *lengths[:-1]])
    assert targets == np.delete(np.asarray(stream.tokens), first).tolist()
    # A target is of the document of the token before it.
    assert (batch["documents"][batch["targets"] != IGNORED] != NO_DOCUMENT).all()


@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=20), sequence=st.integers(8, 20))
@settings(max_examples=40, deadline=None)
def test_documents_that_fit_are_whole_and_no_room_is_left_that_the_next_fits_in(
    lengths: list[int], sequence: int
) -> None:
    stream = packed(lengths, sequence)
    assert stream.packs is not None
    ends, bounds = set(np.cumsum(lengths).tolist()), [stream.packs.bounds(n) for n in range(stream.windows)]
    assert all(each.stop in ends and each.stop - each.start <= sequence + 1 for each in bounds)
    assert [each.start for each in bounds] == [0, *(each.stop for each in bounds[:-1])]
    by_start = dict(zip([0, *np.cumsum(lengths).tolist()], lengths, strict=False))
    for each in bounds[:-1]:
        assert each.stop - each.start + by_start[each.stop] > sequence + 1


def test_what_a_batch_says() -> None:
    stream = packed([3, 2, 6], sequence=5)
    batch = stream.batch(torch.arange(2))
    assert batch["tokens"].tolist() == [[1, 2, END, 4, END], [6, 7, 8, 9, 10]]
    assert batch["targets"].tolist() == [[2, END, IGNORED, END, IGNORED], [7, 8, 9, 10, END]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    for row in range(2):  # a share of one sample
        one = stream.batch(torch.tensor([row]))
        assert all(torch.equal(found, batch[name][row : row + 1]) for name, found in one.items())


@pytest.mark.parametrize("sequence", [3, 8, 40])
@pytest.mark.parametrize("at_once", [1, 2, 1 << 14])
def test_packs_without_an_answer_are_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequence: int, at_once: int
) -> None:
    """Nor are those whose only answer is the first token of a document, which nothing predicts."""
    monkeypatch.setattr(packing, "_AT_ONCE", at_once)
    pairs = [("a" * 12, "b"), ("", "c" * 30), ("a" * 30, "b" * 9), ("aa", "")]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"prompt": before, "completion": after}) + "\n" for before, after in pairs)
    )
    file = prepare(Request(inputs=(tmp_path / "a.jsonl",), validation=0), tmp_path / "out").file
    stream = file.stream(sequence, packing=True)
    every = replace(stream, kept=None, shuffled=False)
    targets = every.batch(torch.arange(every.windows))["targets"]
    assert sorted(stream.order(torch.arange(stream.windows)).tolist()) == [
        number for number, row in enumerate(targets) if (row != IGNORED).any()
    ]


def test_a_folder_of_tokens_is_packed(tmp_path: Path) -> None:
    """Each part has its own documents, and those of validation begin where training ends."""
    texts = [chr(97 + number) * (3 + 2 * number % 7) for number in range(20)]
    file = prepare(Request(inputs=(json_lines(tmp_path / "a.jsonl", texts),), validation=0.25), tmp_path / "out").file
    for part, count in (("training", 15), ("validation", 5)):
        stream = file.stream(16, part=part, packing=True, seed=3)  # type: ignore[arg-type]
        batch = stream.batch(torch.arange(stream.windows))
        assert int((batch["documents"].amax(1) + 1).sum()) == count
        for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True):
            for number in range(int(documents.max()) + 1):
                letters = set(tokens[documents == number].tolist()) - {256}
                assert len(letters) == 1, "a document of more than one letter"
            assert (tokens[documents == NO_DOCUMENT] == 256).all()
