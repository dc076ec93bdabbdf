"""The kernels that compute GELU within a matmul give what others give, and compiled blocks use them."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cubeloom.launch.share_gpu import CONTROL
from cubeloom.parallel import cublaslt
from cubeloom.parallel.feed_forward import gelu_gradient, up_gelu_down
from half_a_block import Half, gradients, tapped_gradients
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU


def _kernels_agree(m: int, k: int, n: int, offset: int, kernels: tuple[bool, bool]) -> None:
    """Where there is a kernel for a pass and where there is none. `offset` shifts the inputs in memory, by numbers."""
    torch.manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    x, gradient = (drawn(m * k + offset)[offset:].view(m, k) for _ in range(2))
    up, bias, down = drawn(n, k) / k**0.5, drawn(n), drawn(k, n) / k**0.5
    found = cublaslt.linear_gelu(x, up, bias), cublaslt.gelu_gradient(gradient, down, drawn(m, n))
    assert tuple(each is not None for each in found) == kernels
    _, after, before = up_gelu_down(x, up, bias, down, torch.zeros_like(down[:, 0]))
    wide = gelu_gradient(gradient, down, before)
    whole = functional.linear(x.double(), up.double(), bias.double()).requires_grad_()
    functional.gelu(whole, approximate="tanh").backward(gradient.double() @ down.double())
    assert whole.grad is not None
    for ours, exact in ((before, whole), (after, functional.gelu(whole, approximate="tanh")), (wide, whole.grad)):
        assert (ours - exact).norm() <= 4e-3 * exact.norm()  # a number of bfloat16 is wrong by 2e-3 on average


@pytest.mark.parametrize(
    ("m", "k", "n", "offset", "kernels"),
    [
        (2048, 64, 256, 0, (True, True)),
        (48, 64, 256, 0, (True, False)),
        (2048, 128, 512, 1, (False, False)),
        (2050, 7, 28, 0, (False, False)),
    ],
    ids=["even", "few rows", "not aligned", "odd"],
)
def test_kernels(gpu_ranks: GpuRanks, m: int, k: int, n: int, offset: int, kernels: tuple[bool, bool]) -> None:
    gpu_ranks(1).run(1, _kernels_agree, m, k, n, offset, kernels)


@pytest.mark.skipif(shutil.which(CONTROL) is None, reason="without MPS ranks have a GPU whole, in turns")
def test_a_part_of_a_gpu_has_none_for_the_backward(gpu_ranks: GpuRanks) -> None:
    gpu_ranks(4).run(1, _kernels_agree, 2048, 1024, 4096, 0, (True, False))


def _compiled_uses_them() -> None:
    torch.manual_seed(0)
    model = Half(64).cuda().bfloat16()
    x = torch.randn(cublaslt.MANY_ROWS, 64, device="cuda").bfloat16()
    apart = gradients(model, model, x)
    cublaslt._plan.cache_clear()
    together = gradients(model, torch.compile(model, fullgraph=True), x)
    assert cublaslt._plan.cache_info().currsize == 2
    cublaslt._plan.cache_clear()
    later = tapped_gradients(model, partial(torch.compile, fullgraph=True), x)
    assert cublaslt._plan.cache_info().currsize == 2
    for found in (together, later):
        for ours, theirs in zip(found, apart, strict=True):
            assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


def test_compiled_blocks_use_them(gpu_ranks: GpuRanks) -> None:
    gpu_ranks(1).run(1, _compiled_uses_them)
