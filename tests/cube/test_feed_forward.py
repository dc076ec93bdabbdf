"""GELU within the matmuls before and behind it gives what GELU between them gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cubeloom.cube import cublaslt
from cubeloom.cube import feed_forward as fused
from cubeloom.cube.feed_forward import up_gelu_down
from half_a_block import Half, gradients


@pytest.mark.timeout(60)
def test_gradients_are_those_of_layer_after_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Half(8).double()
    x = torch.randn(12, 8, dtype=torch.float64)
    apart = gradients(model, model, x)
    monkeypatch.setattr(fused, "_fits", lambda *_: True)
    graphs = []

    def kept(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    together = gradients(model, torch.compile(model, backend=kept, fullgraph=True), x)
    assert "cubeloom.up_gelu_down" in graphs[0].print_readable(print_output=False)
    torch.testing.assert_close(together, apart, rtol=1e-13, atol=1e-13)


def _input(**changes: object) -> Any:
    return SimpleNamespace(**{"is_cuda": True, "dim": lambda: 2, "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize(
    ("x", "half", "fits"),
    [
        (_input(), Half(8), True),
        (_input(), Half(8, approximate="none"), False),
        (_input(), Half(8, bias=False), False),
        (_input(is_cuda=False), Half(8), False),
        (_input(dtype=torch.float32), Half(8), False),
        (_input(dim=lambda: 3), Half(8), False),
    ],
    ids=["fits", "other GELU", "no bias", "CPU", "float32", "3 dimensions"],
)
def test_what_fits(monkeypatch: pytest.MonkeyPatch, x: Any, half: Half, fits: bool) -> None:
    monkeypatch.setattr(cublaslt, "available", lambda: True)
    assert fused._fits(x, half.up, half.act, half.down) is fits


def test_without_such_kernels_it_is_computed_all_the_same() -> None:
    x, up, bias = torch.ones(4, 8).bfloat16(), torch.ones(16, 8).bfloat16(), torch.ones(16).bfloat16()
    assert cublaslt.linear_gelu(x, up, bias) is None
    y, after, before = up_gelu_down(x, up, bias, torch.ones(8, 16).bfloat16(), torch.ones(8).bfloat16())
    assert torch.equal(before, torch.full((4, 16), 9.0).bfloat16())
    assert torch.equal(after, before)  # so far from zero
    assert torch.equal(y, torch.full((4, 8), 145.0).bfloat16())
