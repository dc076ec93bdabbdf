"""Steps timed in turns, and what was found, as tables and ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.energy import Cost
from cubeloom.comm import devices

Step = Callable[[], Tensor | None]  # gives the loss, where there is one to give
KINDS = {  # of kernels, by a word in the name; the first that fits
    "attention": ("attention", "flash", "fmha", "sdpa", "cudnn"),
    "optimizer": ("adam", "multi_tensor"),
    "compiled": ("triton",),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
}


@dataclass(frozen=True)
class Timed:
    """One recipe's steps on one rank. By their last losses recipes are seen to train alike."""

    name: str
    steps_ms: list[float]
    loss: float | None
    step_gib: float
    kernels_ms: dict[str, float] = field(default_factory=dict)  # of one step, by kind; empty unless asked for
    longest_ms: dict[str, float] = field(default_factory=dict)  # of the kernels that took longest, by name

    @property
    def step_ms(self) -> float:
        return median(self.steps_ms)

    def longest_table(self, most: int = 12) -> Table:
        shown = Table("ms of a step", "kernel", title=self.name)
        for kernel, ms in list(self.longest_ms.items())[:most]:
            shown.add_row(f"{ms:.2f}", kernel)
        return shown


def slowest(ranks: list[list[Timed]]) -> list[Timed]:
    """Of each step the time of the rank that took longest; the rest is the last rank's, which has the loss."""
    found = []
    for each in zip(*ranks, strict=True):
        steps = [max(times) for times in zip(*(one.steps_ms for one in each), strict=True)]
        found.append(Timed(each[-1].name, steps, each[-1].loss, max(one.step_gib for one in each)))
    return found


@dataclass(frozen=True)
class Compared:
    """Recipes that were timed in one run."""

    title: str
    timed: list[Timed]
    against: str  # the recipe that others are ratios to
    tokens: int
    teraflops: float
    matmul: float | None = None  # TFLOP/s that a large one reached in this run
    costs: list[Cost] = field(default_factory=list)  # in energy; empty unless asked for
    failed: list[str] = field(default_factory=list)  # recipes of packages that do not work here, and why

    def ratio(self, each: Timed) -> float:
        return next(other.step_ms for other in self.timed if other.name == self.against) / each.step_ms

    def table(self) -> Table:
        shown = Table(title=self.title + (f"; 8192³ matmul {self.matmul:.0f} TFLOP/s" if self.matmul else ""))
        for heading in (
            "",
            "step ms",
            "tokens/s",
            "TFLOP/s",
            "of matmul",
            "a step's GiB",
            "loss",
            f"over {self.against}",
        ):
            shown.add_column(heading, justify="left" if not heading else "right")
        for each in self.timed:
            rate = 1e3 * self.teraflops / each.step_ms
            shown.add_row(
                each.name,
                f"{each.step_ms:.2f}",
                f"{1e3 * self.tokens / each.step_ms:,.0f}",
                f"{rate:.0f}",
                f"{rate / self.matmul:.0%}" if self.matmul else "-",
                f"{each.step_gib:.1f}",
                "-" if each.loss is None else f"{each.loss:.4f}",
                f"{self.ratio(each):.3f}x",
            )
        return shown

    def fastest(self, *beginnings: str) -> list[Timed]:
        """Of the recipes whose names begin so."""
        found = ([each for each in self.timed if each.name.startswith(name)] for name in beginnings)
        return [min(each, key=lambda one: one.step_ms) for each in found if each]

    def kernel_table(self) -> Table:
        kinds = sorted({kind for each in self.timed for kind in each.kernels_ms})
        shown = Table("", *kinds, "all", title="ms of a step that kernels ran")
        for each in self.timed:
            ran = [each.kernels_ms.get(kind, 0.0) for kind in kinds]
            shown.add_row(each.name, *(f"{ms:.2f}" for ms in (*ran, sum(ran))))
        return shown


def take_turns(
    recipes: Mapping[str, Step],
    device: torch.device,
    rounds: int,
    steps: int,
    together: Callable[[], None] = lambda: None,
    profiled: bool = False,
) -> list[Timed]:
    """`together` lets all ranks begin a step at once."""
    times: dict[str, list[float]] = {name: [] for name in recipes}
    losses: dict[str, float | None] = {}
    memory: dict[str, float] = {}
    for number in range(1 + rounds):
        for name, step in recipes.items():
            before = _held(device)
            for _ in range(steps):
                devices.settle(device)
                together()
                began = time.perf_counter()
                loss = step()
                devices.settle(device)
                if number:  # the first round warms up
                    times[name].append(1e3 * (time.perf_counter() - began))
            losses[name] = None if loss is None else loss.item()
            memory[name] = (devices.peak_memory(device) - before) / 2**30
    kernels = {name: kernel_times(step, device) if profiled else ({}, {}) for name, step in recipes.items()}
    return [Timed(name, each, losses[name], memory[name], *kernels[name]) for name, each in times.items()]


def kernel_times(step: Step, device: torch.device, longest: int = 40) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of one step that kernels ran: by kind, and of those that took longest."""
    if device.type == "cpu":
        return {}, {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        devices.settle(device)
    ran = {each.key[:100]: each.self_device_time_total / 1e3 for each in profiler.key_averages()}
    kinds: dict[str, float] = {}
    for name, ms in ran.items():
        kind = next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + ms
    return kinds, dict(sorted(ran.items(), key=lambda item: -item[1])[:longest])


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """TFLOP/s of a large matmul, as warm as the chip is."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(8):
        devices.settle(device)
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(a, b)
        devices.settle(device)
        times.append(time.perf_counter() - began)
    return 10 * 2e-12 * size**3 / median(times[2:])


def _held(device: torch.device) -> int:
    """Bytes of tensors now; the peak is counted from here."""
    if device.type == "cpu":
        return devices.peak_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
