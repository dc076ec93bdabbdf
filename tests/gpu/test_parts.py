"""What a GPU runs for the backward of a fused tensor's parts: each is computed where it belongs, and nothing is joined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code

from cubeloom.models import AttentionCore, SwiGLU
from on_a_gpu import NEEDS_GPU

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of what the compiler imports


def backward_of(module: nn.Module, features: int, *arguments: int) -> tuple[str, Tensor, Tensor]:
    """Its code, and the input's gradient compiled and as it is."""
    torch.manual_seed(0)
    x = torch.randn(256, features, device="cuda", dtype=torch.bfloat16)
    found = []
    code = ""
    for run in (module, torch.compile(module)):
        of_run = x.clone().requires_grad_()
        _, codes = run_fw_bw_and_get_code(lambda run=run, given=of_run: run(given, *arguments))
        code = codes[-1] if codes else ""
        assert of_run.grad is not None
        found.append(of_run.grad)
    return code, found[0], found[1]


def test_both_halves_of_swiglu_s_gradient_are_one_kernel() -> None:
    code, eager, compiled = backward_of(SwiGLU(), 2 * 768)
    assert code.count("async_compile.triton(") == 1 and "cubeloom" not in code
    assert (eager - compiled).norm() <= 1e-2 * eager.norm()


@pytest.mark.parametrize("queries", [1, 4])
def test_queries_and_keys_are_turned_back_into_the_fused_gradient(queries: int) -> None:
    core = AttentionCore(head_dim=64, queries_per_key=queries, rotary_base=1e4)
    code, eager, compiled = backward_of(core, 2 * (queries + 2) * 64, 128)
    called = "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))
    assert "ops.cubeloom.join" not in called and "aten.cat" not in called
    assert (eager - compiled).norm() <= 2e-2 * eager.norm()
