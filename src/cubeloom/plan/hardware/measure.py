"""What runs on a rank to measure its device: products, memory, and what an operator costs however small it is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from cubeloom.base import host
from cubeloom.comm import devices
from cubeloom.plan.hardware.device import Dtype
from cubeloom.plan.hardware.measured import DeviceMeasurements, Heads, Shape, undisturbed

DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MOST_REPEATS = 30
_QUEUED_CALLS = 20
# On the host or on a GPU: numbers of an operator's tensors, which fit in no cache, and parameters of an update.
_COUNTS = {True: (2**22, 2**24), False: (2**24, 2**26, 2**28)}
_PARAMETERS = {True: 2**22, False: 2**26}


def measure_device(
    kind: devices.Kind, shapes: dict[Dtype, tuple[Shape, ...]], heads: tuple[Heads, ...], patience: float
) -> DeviceMeasurements:
    """Measure the device of this rank, `patience` seconds for each product and each other thing."""
    device = devices.current(kind)
    properties = None if kind == devices.CPU else torch.cuda.get_device_properties(device)
    one = torch.ones(1, device=device)
    return DeviceMeasurements(
        what="one core" if properties is None else properties.name,
        processors=1 if properties is None else properties.multi_processor_count,
        memory=_memory_a_core() if properties is None else properties.total_memory,
        products={dtype: {s: _product(s, dtype, device, patience) for s in given} for dtype, given in shapes.items()},
        attention={each: _attention(each, device, patience) for each in heads},
        attention_dtype=_attention_dtype(device),
        operators=dict(_operator(count, device, patience) for count in _COUNTS[device.type == devices.CPU]),
        update=_update(_PARAMETERS[device.type == devices.CPU], device, patience),
        launch=seconds_of(lambda: one.add_(1), device, patience),
        host=0.0 if properties is None else _issuing(lambda: one.add_(1), device),
    )


def seconds_of(function: Callable[[], object], device: torch.device, patience: float) -> float:
    """Of as many calls as fit, after one that does not count. The host computes what it issues; a GPU has a queue between."""
    function()
    devices.settle(device)
    taken: list[float] = []
    until = time.perf_counter() + patience
    while len(taken) < _MOST_REPEATS and (not taken or time.perf_counter() < until):
        taken.append(_done(function) if device.type == devices.CPU else _queued(function, device))
    return undisturbed(taken)


def _done(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _queued(function: Callable[[], object], device: torch.device) -> float:
    """Seconds on the device alone: calls wait behind long work, so that all are issued before the first starts."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _occupy(device)
    begin.record()
    for _ in range(_QUEUED_CALLS):
        function()
    end.record()
    devices.settle(device)
    return begin.elapsed_time(end) / 1e3 / _QUEUED_CALLS


def _issuing(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of the host to issue a call, while the device is busy with something else."""
    _occupy(device)
    begin = time.perf_counter()
    for _ in range(_QUEUED_CALLS):
        function()
    seconds = time.perf_counter() - begin
    devices.settle(device)
    return seconds / _QUEUED_CALLS


def _occupy(device: torch.device) -> None:
    """Some milliseconds of work in the queue."""
    large = torch.ones(4096, 4096, device=device)
    for _ in range(4):
        large = large @ large


def _product(shape: Shape, dtype: Dtype, device: torch.device, patience: float) -> float:
    m, n, k = shape
    # Random values: products of equal ones draw less power, and run at a higher clock.
    left = torch.randn(m, k, dtype=DTYPES[dtype], device=device)
    right = torch.randn(k, n, dtype=DTYPES[dtype], device=device)
    out = torch.empty(m, n, dtype=DTYPES[dtype], device=device)
    return seconds_of(lambda: torch.mm(left, right, out=out), device, patience)


def _operator(count: int, device: torch.device, patience: float) -> tuple[int, float]:
    """A sum of two tensors: two are read, one is written."""
    first, second = (torch.ones(count, device=device) for _ in range(2))
    return 3 * first.nbytes, seconds_of(lambda: torch.add(first, second, out=first), device, patience)


def _attention_dtype(device: torch.device) -> Dtype:
    return "fp32" if device.type == devices.CPU else "bf16"


def _attention(heads: Heads, device: torch.device, patience: float) -> tuple[float, float]:
    """Forward, and backward, of one sequence."""
    length, count, features = heads
    dtype = DTYPES[_attention_dtype(device)]
    given = [torch.randn(1, count, length, features, dtype=dtype, device=device) for _ in range(3)]

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(given[0], given[1], given[2], is_causal=True)

    alone = seconds_of(forward, device, patience)
    for tensor in given:
        tensor.requires_grad_()
    ready = forward()
    wish = torch.ones_like(ready)
    back = seconds_of(lambda: torch.autograd.grad(ready, given, wish, retain_graph=True), device, patience)
    return alone, back


def _update(count: int, device: torch.device, patience: float) -> tuple[int, float]:
    weight = torch.nn.Parameter(torch.ones(count, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return count, seconds_of(optimizer.step, device, patience)


def _memory_a_core() -> int:
    return host.memory()[0] // host.cores()
