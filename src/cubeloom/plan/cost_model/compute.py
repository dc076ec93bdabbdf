"""What a layer computes on one rank, in seconds: forward, input gradient, weight gradient; and how many operators that is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel import specs
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs import LayerSpec, Product
from cubeloom.plan.costs import fused_attention, matmul, memory_bound
from cubeloom.plan.hardware import Cluster, Device, Dtype, Software
from cubeloom.plan.hardware.software import OWN

_HOST_JITTER = 0.12  # by how much hosts differ in the time of a layer: one standard deviation, as a share

_CAST = 3.0  # bytes of a sum of gradients that are cast to float32 first, 6 and 12, over those of a sum as they are, 6
# RMSNorm as PyTorch composes it: cast to float32, square, mean, reciprocal root, product, cast back, times the weight, and the
# residual's sum move 42 bytes of each feature forward and 84 backward; one fused operator moves 8.
_COMPOSED = (42 / 8, 84 / 8)


class Seconds(NamedTuple):
    forward: Any
    input_grad: Any
    weight_grad: Any
    operators: int = 1  # of a forward; the two gradients take as many each


class Machine(NamedTuple):
    device: Device
    dtype: Dtype
    software: Software = OWN

    @classmethod
    def of(cls, cluster: Cluster, dtype: Dtype) -> Machine:
        return cls(cluster.device, dtype, cluster.software)


def seconds(layer: LayerSpec, s: ParallelConfig, machine: Machine) -> Seconds:
    """Of one micro-batch, strand by strand: smaller products, more launches."""
    if isinstance(layer, specs.AttentionSpec):
        return _attention(layer, s, machine)
    touched, found = layer.touched(s), Seconds(0.0, 0.0, 0.0, 0)
    for product in layer.products(s):
        one = _product(product, s, machine, _dtype(layer, s, machine))
        found = Seconds(*(one + more for one, more in zip(found, one, strict=True)))
    if isinstance(layer, specs.BetweenSpec):
        found = _fused(layer.flops_here(s), machine)
    if touched is None:
        return found

    passes = _passes(layer, machine.software)

    def beside(nbytes: Any, times: float = passes[0]) -> Any:
        moved = nbytes * times / s.ways
        return s.ways * memory_bound(machine.device, moved) if np.any(nbytes) else 0.0

    return Seconds(
        found.forward + beside(touched.forward),
        found.input_grad + beside(touched.input_grad, passes[1]),
        found.weight_grad + beside(touched.weight_grad),
        found.operators or touched.operators,
    )


def _passes(layer: LayerSpec, software: Software) -> tuple[float, float]:
    """How often a forward and a backward move a layer's bytes, over operators that are fused."""
    if isinstance(layer, specs.LossSpec):
        return 1.0, 1.0
    if isinstance(layer, specs.NormSpec) and not layer.centred and software.composed_norms:
        return _COMPOSED
    return software.traffic, software.traffic


def issue(found: Seconds, s: ParallelConfig, machine: Machine) -> Seconds:
    """A layer by itself, between whose passes the device is idle: the host's time, where it is slower."""
    host = issued(found.operators, s, machine)
    forward, input_grad, weight_grad = (np.maximum(host, each) for each in found[:3])
    return Seconds(forward, input_grad, weight_grad, found.operators)


def issued(operators: int, s: ParallelConfig, machine: Machine) -> Any:
    """Seconds of the host to issue so many operators; of a recording it issues nothing.

    Ranks that meet in the collectives of every layer wait for the slowest host among them.
    """
    slowest = 1 + _HOST_JITTER * np.sqrt(2 * np.log(s.z * s.y * s.x))
    each = machine.device.host * machine.software.operators * slowest
    return operators * each * s.ways * np.where(s.recorded, 0, 1)


def optimizer(numbers: Any, item: int, device: Device, software: Software = OWN) -> Any:
    """AdamW: gradient and weight, two states and the float32 weight, read and written."""
    slower = device.bandwidth_fraction / (device.update_fraction or device.bandwidth_fraction)
    less = OWN.state_bytes(item) - software.state_bytes(item)
    return memory_bound(device, slower * numbers * (2 * item + software.update_bytes - 4 - 2 * less))


def _dtype(layer: LayerSpec, s: ParallelConfig, machine: Machine) -> Dtype:
    """In which a layer's products are computed: with FP8, all linears but the head.

    Ours by the layout's precision; of others' runs all, as their software has it.
    """
    if s.precision == "fp8" and isinstance(layer, specs.LinearSpec) and layer.takes_fp8:
        return "fp8"
    eight = machine.software.products == "fp8" and machine.device.fp8 > 0 and machine.dtype != "fp32"
    return "fp8" if eight and isinstance(layer, specs.LinearSpec) and not layer.with_loss else machine.dtype


def _product(product: Product, s: ParallelConfig, machine: Machine, dtype: Dtype) -> Seconds:
    device, strands = machine.device, s.ways
    rows, k, n = product.rows / strands, product.k, product.n
    into, kernel_numel = k * product.kernel_numel, product.kernel_numel
    cast: list[Any] = [0.0, 0.0, 0.0]
    if dtype == "fp8":  # read, and written as it is and transposed: input and weight; the output's gradient
        cast = [memory_bound(device, (s.item + 2) * count) for count in (rows * k + k * n, rows * n, 0.0)]
    added: Any = machine.software.accumulates
    if added:
        added = added * (_CAST if s.gradient > s.item else 1.0)
        added = memory_bound(device, added * into * n / np.where(s.weights_cut, s.z, 1))
    return Seconds(
        strands * (matmul(device, rows, n, into, dtype) + cast[0]),
        strands * (matmul(device, rows, k, n * kernel_numel, dtype) + cast[1]),
        strands * matmul(device, n, into, rows, dtype) + added,
        3,
    )


def _fused(flops: Any, machine: Machine) -> Seconds:
    """Products between layers, most of them attention's, whose backward makes half of them once more."""
    rate = machine.device.peak(machine.dtype) * machine.device.matmul_fraction
    return Seconds(flops / rate, 2.5 * flops / rate, 0.0, 4)


def _attention(layer: specs.AttentionSpec, s: ParallelConfig, machine: Machine) -> Seconds:
    device, software = machine.device, machine.software
    length = s.sequence if layer.length is None else layer.length
    sequences = s.samples_of * layer.heads / s.size("x", "y")
    moved = s.rows(layer.length) * (layer.heads + 2 * layer.kv_heads) * layer.head_dim / s.size("x", "y") * s.item
    # Queries and keys are turned; their gradients and the values' are joined.
    copies = (2 if layer.rotary else 1) * memory_bound(device, 2 * moved * software.traffic)
    launches = s.ways * device.launch
    if software.attention == "unfused":
        forward, backward = _scores(length, layer.head_dim, sequences, s, machine)
    else:
        forward, backward = fused_attention(
            device, length, layer.head_dim, sequences, layer.causal, machine.dtype, software.attention
        )
    return Seconds(forward + copies + launches, backward + copies + launches, 0.0, 6)


def _scores(length: Any, head_dim: int, sequences: Any, s: ParallelConfig, machine: Machine) -> tuple[Any, Any]:
    """Scores are written: softmax and dropout read and write them. A causal mask spares nothing."""
    device, dtype = machine.device, machine.dtype
    scores = sequences * length * length * s.item
    dropped = 2.5 if machine.software.dropout else 0.0  # read and written, with a mask of bytes
    inner = matmul(device, length, length, head_dim, dtype, sequences)
    outer = matmul(device, length, head_dim, length, dtype, sequences)
    forward = inner + outer + memory_bound(device, (2 + dropped) * scores)
    backward = 2 * inner + 2 * outer + memory_bound(device, (3 + dropped) * scores)
    return forward, backward
