"""Initial values drawn on a GPU: the same bits however a parameter is cut, and a CPU's but for the last ones."""

from __future__ import annotations

import torch

from cubeloom.base import counter
from cubeloom.comm import devices
from on_a_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
SHAPE = (3000, 1701)  # more than one block of them


def test_blocks_are_those_of_the_whole() -> None:
    gpu = devices.current("cuda")
    whole = counter.normal(1, SHAPE, (0, 0), SHAPE, gpu)
    for offset, local in (((0, 0), (1000, 1701)), ((100, 0), (2900, 1701)), ((17, 5), (33, 7)), ((0, 1700), (3000, 1))):
        rows, columns = (slice(first, first + size) for first, size in zip(offset, local, strict=True))
        assert torch.equal(counter.normal(1, SHAPE, offset, local, gpu), whole[rows, columns])


def test_a_cpu_draws_nearly_the_same() -> None:
    gpu = devices.current("cuda")
    drawn = counter.normal(1, SHAPE, (0, 0), SHAPE, gpu)
    torch.testing.assert_close(drawn.cpu(), counter.normal(1, SHAPE, (0, 0), SHAPE), rtol=1e-12, atol=1e-14)
