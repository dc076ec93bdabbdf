"""Weights of few digits are updated through a float32 copy, where that is wanted."""

from __future__ import annotations

import pytest
import torch

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel.parameter import distribute, local_of
from cubeloom.train.part import Part


def updated(dtype: torch.dtype, fp32_master_weights: bool) -> tuple[bool, torch.dtype, torch.dtype | None, float]:
    """A part of two rows of four, set to two: whether it is a master, its dtype, its gradients', the sum of all rows."""
    parameter = distribute(Network(Grid()), torch.ones(4, 2, dtype=dtype), (4, 2), {})
    part = Part.of(parameter, slice(1, 3), fp32_master_weights)
    part.tensor.detach().fill_(2)
    part.publish()
    return part.master, part.tensor.dtype, parameter.grad_dtype, local_of(parameter).sum().item()


@pytest.mark.parametrize("fp32_master_weights", [True, False])
def test_masters_are_kept_where_wanted(ranks: RankPool, fp32_master_weights: bool) -> None:
    dtype = torch.float32 if fp32_master_weights else torch.bfloat16
    assert ranks.run(1, updated, torch.bfloat16, fp32_master_weights) == [(fp32_master_weights, dtype, dtype, 4 + 8)]


def test_weights_of_many_digits_need_none(ranks: RankPool) -> None:
    assert ranks.run(1, updated, torch.float32, True) == [(False, torch.float32, torch.float32, 4 + 8)]
