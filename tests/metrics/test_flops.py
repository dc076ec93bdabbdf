"""FLOPs from the layers agree with the published formula; a device is known or said to be unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cubeloom.base.torch_private import FlopCounter
from cubeloom.models import GPTConfig, build
from cubeloom.parallel import Batch
from cubeloom.plan.hardware import device
from cubeloom.train.job import Job
from cubeloom.train.job.settings import ModelSettings
from cubeloom.train.metrics import flops_per_token, mfu, peak_of

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.wide, self.narrow, self.head = nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 32)

    def forward(self, tokens, targets):
        x = self.narrow(self.wide(self.table(tokens)).relu())
        return nn.functional.cross_entropy(self.head(x).view(-1, 32), targets.view(-1))

def build():
    return Net(){cut}
"""


def a_job(preset: str, sequence: int) -> Job:
    return Job(model=ModelSettings(preset=preset), batch=Batch(samples=1, sequence=sequence))


@pytest.mark.parametrize("preset", [pytest.param("gpt-175b", marks=pytest.mark.long), "gpt-5b", "gpt2"])
def test_gpt_needs_what_the_formula_of_megatron_says(preset: str) -> None:
    job = a_job(preset, 1024)
    config = job.source().config  # type: ignore[attr-defined]
    assert isinstance(config, GPTConfig)
    layers, h, s, v = config.layers, config.hidden, 1024, config.vocab
    # Narayanan et al. 2021: 96 B s l h² (1 + s/6h + V/16lh) with recomputation; without it 72, and V/12lh.
    formula = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert flops_per_token(job) == pytest.approx(formula, rel=1e-9)


@pytest.mark.parametrize("preset", ["gpt-tiny", "llama-tiny", "bert-tiny"])
def test_the_count_is_what_torch_counts_while_it_runs(preset: str) -> None:
    """Grouped queries and gates included."""
    job = a_job(preset, 16)
    model = build(preset)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    # The counter knows the plain products of attention, and not the CPU's fused kernel.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens=tokens)
    assert flops_per_token(job) == pytest.approx(3 * counter.get_total_flops() / tokens.numel(), rel=1e-9)


def test_of_images_a_sample_is_a_token() -> None:
    job, model = a_job("unet-tiny", 1), build("unet-tiny")
    data = job.source().samples(Batch(1, 1), 0, 0, torch.float32)
    with FlopCounter() as counter, torch.no_grad():
        model(**data)
    assert flops_per_token(job) == pytest.approx(3 * counter.total, rel=1e-9)


@pytest.mark.parametrize("own_cut", [False, True])
def test_of_a_file_they_are_those_of_its_products(tmp_path: Path, own_cut: bool) -> None:
    """Whether its cut is found or its own."""
    (tmp_path / "net.py").write_text(NET.format(cut=", {}" if own_cut else ""), encoding="utf-8")
    job = Job(model=ModelSettings(name=f"{tmp_path / 'net.py'}:build"), batch=Batch(samples=2, sequence=6))
    assert flops_per_token(job) == 3 * 2 * (8 * 24 + 24 * 8 + 8 * 32)


def test_mfu_is_a_share_of_all_ranks() -> None:
    assert mfu(1000.0, 2e9, 1e12, 4) == pytest.approx(0.5)
    assert mfu(1000.0, 2e9, None, 4) is None


@pytest.mark.parametrize(
    "reported, name",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100-SXM-40GB", "a100-40"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla P100-PCIE-16GB", "p100"),
    ],
)
def test_devices_are_known_by_the_names_that_torch_reports(reported: str, name: str) -> None:
    assert peak_of(reported, "float32") == device(name).fp32
    assert peak_of(reported, "float16") == device(name).fp16


@pytest.mark.parametrize(
    "reported",
    [
        "cpu",
        "",
        "NVIDIA",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "Intel(R) Xeon(R) Platinum 8480+",
    ],
)
def test_a_device_that_is_not_quite_a_known_one_is_unknown(reported: str) -> None:
    assert peak_of(reported, "bfloat16") is None


def test_no_file_says_how_fast_float64_is() -> None:
    assert peak_of("NVIDIA H200", "float64") is None


def test_a_peak_that_its_maker_does_not_say_is_unknown() -> None:
    """A V100 has no units for bfloat16: its file estimates how fast it is all the same."""
    assert device("v100").facts["bf16"].confidence == "estimated"
    assert peak_of("Tesla V100-SXM2-16GB", "bfloat16") is None
    assert peak_of("NVIDIA H200", "bfloat16") == device("h200").bf16
