"""Indices out of range stop the GPU, as torch's own kernels do, and nobody waits for it before."""

from __future__ import annotations

import subprocess
import sys

import pytest

from on_a_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

# In a process of its own: a GPU that has stopped is of no use to it any more.
PROGRAM = """
import sys, torch
from cubeloom.parallel.layers.indices import check_indices
indices = torch.tensor([0, -100, int(sys.argv[1])], device="cuda")
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
check_indices(indices, 4, "loss: target", -100)
torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("index", [3, 4, -1])
def test_an_index_out_of_range_stops_the_gpu(index: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(index)], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == (index == 3), done.stderr
    if index != 3:
        assert "device-side assert" in done.stderr or "Assertion" in done.stderr
