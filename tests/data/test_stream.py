"""Samples are a pure function of the seed and their number; an epoch is every window once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom.base.errors import UserError
from cubeloom.train.data import Mixture, Permutation, Stream
from cubeloom.train.data.mixture import LONGEST, turn, whole_numbers


@given(size=st.integers(1, 3000), key=st.integers(-(1 << 63), (1 << 63) - 1))
@settings(max_examples=60, deadline=None)
def test_a_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(Permutation(size, key)(torch.arange(size)).tolist()) == list(range(size))


@given(size=st.integers(1 << 40, 1 << 60), key=st.integers(0, 1 << 60))
@settings(max_examples=20, deadline=None)
def test_large_ones_stay_inside_without_a_list(size: int, key: int) -> None:
    index = torch.arange(size - 100, size)
    found = Permutation(size, key)(index)
    assert len(set(found.tolist())) == 100
    assert 0 <= int(found.min()) <= int(found.max()) < size


def test_places_are_evenly_likely() -> None:
    keys, size = 600, 6
    first = Counter(tuple(Permutation(size, key)(torch.arange(2)).tolist()) for key in range(keys))
    expected = keys / (size * (size - 1))
    chi_squared = sum((first[a, b] - expected) ** 2 / expected for a in range(size) for b in range(size) if a != b)
    assert chi_squared < 58.3  # a fair one exceeds this once in a thousand times (29 degrees of freedom)


def test_an_epoch_is_every_window_once_and_the_next_is_in_another_order() -> None:
    stream = Stream(np.arange(103, dtype=np.uint16), sequence=5, seed=3)
    assert stream.windows == 20
    order = stream.order(torch.arange(60)).view(3, 20)
    assert all(sorted(epoch) == list(range(20)) for epoch in order.tolist())
    assert len({tuple(epoch) for epoch in order.tolist()}) == 3
    assert order.tolist() != Stream(stream.tokens, 5, seed=4).order(torch.arange(60)).view(3, 20).tolist()
    targets = stream.samples(torch.arange(20))[:, 1:]
    assert sorted(targets.flatten().tolist()) == list(range(1, 101))


@given(numbers=st.lists(st.integers(0, 200), min_size=1, max_size=8), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_sample_does_not_depend_on_what_was_asked_before(numbers: list[int], seed: int) -> None:
    stream = Stream(np.arange(100, dtype=np.uint32), sequence=3, seed=seed)
    whole = stream.samples(torch.arange(201))
    assert torch.equal(stream.samples(torch.tensor(numbers)), whole[numbers])
    assert whole.dtype == torch.int64


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="5 tokens are too few for a sequence of 5"):
        Stream(np.arange(5), sequence=5)


@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_shares_are_never_a_sample_off(parts: list[int]) -> None:
    whole = sum(parts)
    given_ = torch.nn.functional.one_hot(torch.tensor(turn(parts)), len(parts)).cumsum(0)
    exact = torch.arange(1, whole + 1)[:, None] * torch.tensor(parts)
    assert (given_ * whole - exact).abs().max() < whole
    assert given_[-1].tolist() == parts


def numbered(first: int, count: int, tokenizer: str = "") -> Stream:
    return Stream(np.arange(first, first + count), sequence=2, shuffled=False, tokenizer=tokenizer)


def test_each_stream_gives_its_samples_in_order() -> None:
    streams = [numbered(0, 2001), numbered(10_000, 2001), numbered(20_000, 2001)]
    mixture = Mixture(streams, [0.7, 0.2, 0.1])
    which, own = mixture.source(torch.arange(1000))
    for index, stream in enumerate(streams):
        mine = which == index
        assert own[mine].tolist() == list(range(int(mine.sum())))
        found, expected = mixture.batch(torch.arange(1000)), stream.batch(own[mine])
        assert all(torch.equal(found[name][mine], rows) for name, rows in expected.items())
    assert which.bincount().tolist() == [700, 200, 100]


def test_weights_are_taken_as_written() -> None:
    assert whole_numbers([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_numbers([3, 1.5]) == [2, 1]
    with pytest.raises(UserError, match="fewer digits"):
        whole_numbers([1 / 3, 1 / 7])
    with pytest.raises(UserError, match="above 0"):
        whole_numbers([1, 0])
    with pytest.raises(UserError, match="above 0"):
        whole_numbers([1, float("inf")])
    assert sum(whole_numbers([LONGEST - 1, 1])) == LONGEST


def test_streams_that_do_not_mix() -> None:
    with pytest.raises(UserError, match="a weight for each stream"):
        Mixture([numbered(0, 9)], [1, 2])
    with pytest.raises(UserError, match="sequences \\[2, 3\\] do not mix"):
        Mixture([numbered(0, 9), Stream(np.arange(9), 3)], [1, 2])
    with pytest.raises(UserError, match="different tokenizers do not mix"):
        Mixture([numbered(0, 9, "bytes"), numbered(0, 9, "other")], [1, 2])
