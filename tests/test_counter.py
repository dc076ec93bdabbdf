import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom.base import counter


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 37), st.integers(1, 41))
def test_a_block_is_the_same_bit_for_bit_however_the_tensor_is_cut(rows: int, columns: int, n: int, k: int) -> None:
    shape = (rows * n, columns * k)
    whole = counter.normal(7, shape, (0, 0), shape)
    for row in range(rows):
        for column in range(columns):
            offset = (row * n, column * k)
            block = counter.normal(7, shape, offset, (n, k))
            assert torch.equal(block, whole[offset[0] : offset[0] + n, offset[1] : offset[1] + k])


def test_large_blocks_agree_too() -> None:
    shape = (300, 401)
    whole = counter.normal(1, shape, (0, 0), shape)
    assert torch.equal(counter.normal(1, shape, (100, 0), (200, 401)), whole[100:])


def test_the_numbers_are_normal_and_keys_are_independent() -> None:
    shape = (400, 500)
    first, second = (counter.normal(counter.key(0, name), shape, (0, 0), shape) for name in ("a", "b"))
    assert abs(first.mean()) < 0.01
    assert abs(first.std() - 1) < 0.01
    assert abs((first**4).mean() - 3) < 0.1  # the kurtosis of a normal distribution
    assert abs((first * second).mean()) < 0.01


def test_uniform_numbers_fill_the_unit_interval() -> None:
    drawn = counter.uniform(3, torch.arange(100_000))
    assert 0 <= drawn.min() < 0.001
    assert 0.999 < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.01
