"""What a layer computes on one rank, in seconds: forward, input gradient, weight gradient; and how many operators that is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel import specs
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs import LayerSpec, Product
from cubeloom.plan.costs import issued, matmul, memory_bound
from cubeloom.plan.hardware import Device, Dtype


class Seconds(NamedTuple):
    forward: Any
    input_grad: Any
    weight_grad: Any
    operators: int = 1  # of a forward; the two gradients take as many each


class Machine(NamedTuple):
    device: Device
    dtype: Dtype


def seconds(layer: LayerSpec, s: ParallelConfig, machine: Machine) -> Seconds:
    """Of one micro-batch, strand by strand: smaller products, more launches."""
    if isinstance(layer, specs.AttentionSpec):
        return _attention(layer, s, machine)
    touched, found = layer.touched(s), Seconds(0.0, 0.0, 0.0, 0)
    for product in layer.products(s):
        found = Seconds(*(one + more for one, more in zip(found, _product(product, s.ways, machine), strict=True)))
    if isinstance(layer, specs.BetweenSpec):
        found = _fused(layer.flops_here(s), machine)
    if touched is None:
        return found

    def beside(nbytes: Any) -> Any:
        return s.ways * memory_bound(machine.device, nbytes / s.ways) if np.any(nbytes) else 0.0

    return Seconds(
        found.forward + beside(touched.forward),
        found.input_grad + beside(touched.input_grad),
        found.weight_grad + beside(touched.weight_grad),
        found.operators or touched.operators,
    )


def issue(found: Seconds, s: ParallelConfig, machine: Machine) -> Seconds:
    """Where the host is slower than the device, its time; of a recording it issues nothing."""
    operators = found.operators * s.ways * np.where(s.recorded, 0, 1)
    forward, input_grad, weight_grad = (issued(machine.device, each, operators) for each in found[:3])
    return Seconds(forward, input_grad, weight_grad, found.operators)


def optimizer(numbers: Any, item: int, device: Device) -> Any:
    """AdamW: gradient and weight, two states and the float32 weight, read and written."""
    return memory_bound(device, numbers * (2 * item + 4 * 3 * 2))


def _product(product: Product, strands: Any, machine: Machine) -> Seconds:
    device, dtype = machine
    rows, k, n, kernel_numel = product.rows / strands, product.k, product.n, product.kernel_numel
    return Seconds(
        strands * matmul(device, rows, n, k * kernel_numel, dtype),
        strands * matmul(device, rows, k, n * kernel_numel, dtype),
        strands * matmul(device, n, k * kernel_numel, rows, dtype),
        3,
    )


def _fused(flops: Any, machine: Machine) -> Seconds:
    """Products between layers, most of them attention's, whose backward makes half of them once more."""
    rate = machine.device.peak(machine.dtype) * machine.device.matmul_fraction
    return Seconds(flops / rate, 2.5 * flops / rate, 0.0, 4)


def _attention(layer: specs.AttentionSpec, s: ParallelConfig, machine: Machine) -> Seconds:
    """Fused: two products of [length, head] and [head, length] forward, five backward; half of each where it is causal."""
    device, dtype = machine
    length = s.sequence if layer.length is None else layer.length
    sequences = s.samples_of * layer.heads / s.size("x", "y")
    flops = 2 * length * length * layer.head_dim * sequences * (0.5 if layer.causal else 1.0)
    rate = device.peak(dtype) * device.matmul_fraction
    moved = s.rows(layer.length) * (layer.heads + 2 * layer.kv_heads) * layer.head_dim / s.size("x", "y") * s.item
    copies = (3 if layer.rotary else 1) * memory_bound(device, 2 * moved)
    launches = s.ways * device.launch
    return Seconds(2 * flops / rate + copies + launches, 5 * flops / rate + copies + launches, 0.0, 6)
