"""GELU within the matmuls before and behind it gives what GELU between them gives."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from cubeloom.parallel import cublaslt
from cubeloom.parallel import feed_forward as fused
from cubeloom.parallel.feed_forward import up_gelu_down
from half_a_block import Half, gradients, tapped_gradients


@pytest.fixture
def half() -> Half:
    torch.manual_seed(0)
    return Half(8).double()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-2, 2, 12 * 8, dtype=torch.float64).view(12, 8).sin()


@pytest.fixture
def apart(half: Half, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Gradients of layer after layer; from then on the layers are taken together."""
    found = gradients(half, half, x)
    monkeypatch.setattr(fused, "_fits", lambda *_: True)
    return found


@pytest.mark.timeout(60)
def test_gradients_are_those_of_layer_after_layer(half: Half, x: Tensor, apart: list[Tensor]) -> None:
    graphs = []

    def kept(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    together = gradients(half, torch.compile(half, backend=kept, fullgraph=True), x)
    assert "cubeloom.up_gelu_down" in graphs[0].print_readable(print_output=False)
    torch.testing.assert_close(together, apart, rtol=1e-13, atol=1e-13)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # says torch of what its own compiler does
def test_weight_gradients_of_tapped_layers_are_left_out(half: Half, x: Tensor, apart: list[Tensor]) -> None:
    backwards = []

    def kept(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        backwards.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=kept)
    later = tapped_gradients(half, partial(torch.compile, backend=backend, fullgraph=True), x)
    torch.testing.assert_close(later, apart, rtol=1e-13, atol=1e-13)
    # Of the four matmuls of a backward one is within the GELU's, and those of the weights are not there.
    called = [str(node.target) for graph in backwards for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("cubeloom.gelu_gradient.default") == 1
    assert called.count("aten.mm.default") == 1


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
