"""The kernels that compute GELU within a matmul give what others give, and compiled blocks use them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cubeloom.cube import cublaslt
from cubeloom.cube.feed_forward import gelu_gradient, up_gelu_down
from half_a_block import Half, gradients
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU


def _kernels_agree(m: int, k: int, n: int, offset: int, fits: bool) -> None:
    """Where there is a kernel and where there is none. `offset` shifts the input in memory, by numbers."""
    torch.manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    x = drawn(m * k + offset)[offset:].view(m, k)
    up, bias, down, gradient = drawn(n, k) / k**0.5, drawn(n), drawn(k, n) / k**0.5, drawn(m, k)
    assert (cublaslt.linear_gelu(x, up, bias) is not None) is fits
    _, after, before = up_gelu_down(x, up, bias, down, torch.zeros_like(down[:, 0]))
    wide = gelu_gradient(gradient, down, before)
    whole = functional.linear(x.double(), up.double(), bias.double()).requires_grad_()
    functional.gelu(whole, approximate="tanh").backward(gradient.double() @ down.double())
    assert whole.grad is not None
    for ours, exact in ((before, whole), (after, functional.gelu(whole, approximate="tanh")), (wide, whole.grad)):
        assert (ours - exact).norm() <= 4e-3 * exact.norm()  # a number of bfloat16 is wrong by 2e-3 on average


@pytest.mark.parametrize(
    ("m", "k", "n", "offset", "fits"),
    [(256, 64, 256, 0, True), (48, 64, 256, 0, True), (64, 128, 512, 1, False), (30, 7, 28, 0, False)],
    ids=["even", "few rows", "not aligned", "odd"],
)
def test_kernels(gpu_ranks: GpuRanks, m: int, k: int, n: int, offset: int, fits: bool) -> None:
    gpu_ranks(4).run(1, _kernels_agree, m, k, n, offset, fits)


def _compiled_uses_them() -> None:
    torch.manual_seed(0)
    model = Half(64).cuda().bfloat16()
    x = torch.randn(256, 64, device="cuda").bfloat16()
    apart = gradients(model, model, x)
    cublaslt._plan.cache_clear()
    together = gradients(model, torch.compile(model, fullgraph=True), x)
    assert cublaslt._plan.cache_info().currsize == 2
    for ours, theirs in zip(together, apart, strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


def test_compiled_blocks_use_them(gpu_ranks: GpuRanks) -> None:
    gpu_ranks(4).run(1, _compiled_uses_them)
