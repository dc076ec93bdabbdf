"""The savings of Tensor3D's communication model, from our closed forms of our models' layers."""

from __future__ import annotations

import pytest
from bench.tensor3d import Row, our_layers, table, their_layers


@pytest.mark.parametrize(
    ("ranks", "plane", "saved"),
    [
        (4, (1, 4), 0.0),
        (8, (2, 4), 0.143),
        (16, (2, 8), 0.333),
        (32, (4, 8), 0.484),
        (64, (4, 16), 0.619),
        (128, (8, 16), 0.717),
        (256, (8, 32), 0.796),
    ],
)
def test_gpt(ranks: int, plane: tuple[int, int], saved: float) -> None:
    """`reference/tensor3d.md` 1.7: sqrt(3 G) ranks along y, sqrt(G / 3) along x."""
    row = Row.of("gpt-80b", our_layers("gpt-80b"), ranks)
    assert (row.best.grid.x, row.best.grid.y) == plane
    assert row.saved == pytest.approx(saved, abs=5e-4)


@pytest.mark.parametrize(("ranks", "saved"), [(4, 0.44), (8, 0.57), (16, 0.66), (32, 0.75)])
def test_unet_as_tensor3d_cuts_it(ranks: int, saved: float) -> None:
    """The same page's, for other widths and resolutions: near those of ours."""
    assert Row.of("unet-28b", their_layers("unet-28b"), ranks).saved == pytest.approx(saved, abs=0.02)


def test_the_table_has_a_row_for_each_number_of_ranks() -> None:
    rows = [Row.of("unet-28b", our_layers("unet-28b"), ranks) for ranks in (4, 16)]
    assert table("unet-28b", rows).row_count == 2
