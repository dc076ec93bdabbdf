"""What a layer computes on one rank, in seconds: forward, input gradient, weight gradient; and how many operators that is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan.closed.images import own_samples
from cubeloom.plan.closed.settings import Settings, choose
from cubeloom.plan.costs import issued, matmul, memory_bound
from cubeloom.plan.hardware import Device, Dtype
from cubeloom.plan.model import layers as plan


class Seconds(NamedTuple):
    forward: Any
    input_grad: Any
    weight_grad: Any
    operators: int = 1  # of a forward; the two gradients take as many each


class Machine(NamedTuple):
    device: Device
    dtype: Dtype


def seconds(layer: plan.Any, s: Settings, machine: Machine) -> Seconds:
    """Of one micro-batch, strand by strand: smaller products, more launches."""
    strand = s.ways
    match layer:
        case plan.Linear():
            _, out = layer.pixels or (None, None)
            rows, k, n = s.rows(out) / strand, layer.k / s.size(layer.k_axis), layer.n / s.size(layer.n_axis)
            three = _product(rows, k, n, layer.taps, strand, machine)
            at_rest = rows * n / s.further(layer.k_axis, layer.always_out)
            # The bias, and behind a block's last linear the residual stream.
            return _beside(three, 5 * at_rest * s.item, 3 * at_rest * s.item, strand, machine)
        case plan.Edge():
            return _edge(layer, s, machine)
        case plan.Whole():
            return _product(s.samples_of / strand, layer.k, layer.n, 1, strand, machine)
        case plan.Attention():
            return _attention(layer, s, machine)
        case plan.Embedding():
            moved = s.rows() * layer.features / s.x * s.item
            return Seconds(memory_bound(machine.device, 2 * moved), 0.0, memory_bound(machine.device, 3 * moved), 3)
    forward, backward, operators = _traffic(layer, s)
    each = strand * memory_bound(machine.device, forward / strand)
    return Seconds(each, strand * memory_bound(machine.device, backward / strand), 0.0, operators)


def issue(found: Seconds, s: Settings, machine: Machine) -> Seconds:
    """Where the host is slower than the device, its time; of a recording it issues nothing."""
    operators = found.operators * s.ways * np.where(s.recorded, 0, 1)
    forward, input_grad, weight_grad = (issued(machine.device, each, operators) for each in found[:3])
    return Seconds(forward, input_grad, weight_grad, found.operators)


def optimizer(numbers: Any, item: int, device: Device) -> Any:
    """AdamW: gradient and weight, two states and the float32 weight, read and written."""
    return memory_bound(device, numbers * (2 * item + 4 * 3 * 2))


def _product(rows: Any, k: Any, n: Any, taps: int, strands: Any, machine: Machine) -> Seconds:
    device, dtype = machine
    return Seconds(
        strands * matmul(device, rows, n, k * taps, dtype),
        strands * matmul(device, rows, k, n * taps, dtype),
        strands * matmul(device, n, k * taps, rows, dtype),
        3,
    )


def _beside(three: Seconds, forward: Any, backward: Any, strands: Any, machine: Machine) -> Seconds:
    """A product, and a memory-bound operator in each pass."""
    return three._replace(
        forward=three.forward + strands * memory_bound(machine.device, forward),
        input_grad=three.input_grad + strands * memory_bound(machine.device, backward),
    )


def _edge(layer: plan.Edge, s: Settings, machine: Machine) -> Seconds:
    samples = s.samples_of / s.further(plan.other(layer.side), layer.kind == "stay")
    k = layer.k if layer.kind == "slice" else layer.k / s.size(layer.side)
    n = layer.n / s.size(layer.side) if layer.kind in ("slice", "grouped") else layer.n
    return _product(samples * layer.pixels[1] / s.ways, k, n / layer.groups, layer.taps, s.ways, machine)


def _attention(layer: plan.Attention, s: Settings, machine: Machine) -> Seconds:
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


def _traffic(layer: plan.Any, s: Settings) -> tuple[Any, Any, int]:
    """Bytes that memory-bound operators read and write, forward and backward, and how many operators a forward has."""
    match layer:
        case plan.Norm():
            numbers = s.rows() / s.further("y", layer.always) * layer.features / s.x
            # One fused operator where features are whole; otherwise several, in float32.
            wide = choose(s.x > 1, 6 * s.statistic, 2 * s.item)
            return numbers * wide, 2 * numbers * wide, 4
        case plan.Pointwise():
            numbers = at_rest(layer, s)
            each = (layer.inputs + layer.outputs) * s.item
            return numbers * each, numbers * (each + layer.inputs * s.item), 2
        case plan.Loss():
            numbers = s.rows() * layer.classes / s.size("x", "y")
            return numbers * (s.item + 4 * s.statistic), numbers * (s.item + 3 * s.statistic), 8
        case plan.ImageNorm():
            numbers = own_samples(layer.side, s) * layer.pixels * layer.features / s.size(layer.side)
            return 4 * numbers * s.item, 8 * numbers * s.item, 4
        case plan.Table():
            numbers = s.rows() / s.further("y") * layer.features / s.x
            return 3 * numbers * s.item, 3 * numbers * s.item, 3
    return 0.0 * s.x, 0.0 * s.x, 2


def at_rest(layer: plan.Pointwise, s: Settings) -> Any:
    """Rows of a rank times the share of the features that it has."""
    if layer.whole:
        return s.samples_of
    across = plan.other(layer.side)
    return s.rows(layer.pixels) / s.further(across, layer.always) / s.size(layer.side)
