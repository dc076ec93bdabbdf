"""Weights of few digits are updated through a float32 copy, where that is wanted."""

from __future__ import annotations

import pytest
import torch

from cubeloom.train.part import Part


@pytest.mark.parametrize("masters", [True, False])
def test_masters_are_kept_where_wanted(masters: bool) -> None:
    block = torch.ones(4, 2, dtype=torch.bfloat16)
    part = Part.of(block, slice(1, 3), masters)
    assert part.master is masters
    assert part.tensor.dtype is (torch.float32 if masters else torch.bfloat16)
    part.tensor.detach().fill_(2)
    part.publish()
    assert block.sum() == 4 + 8


def test_weights_of_many_digits_need_none() -> None:
    assert not Part.of(torch.ones(4, 2), slice(0, 4), True).master
