"""What a layer computes on one rank, in seconds: forward, input gradient, weight gradient; and how many operators that is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel import specs
from cubeloom.parallel.config import ParallelConfig, choose
from cubeloom.parallel.specs import LayerSpec, Product, Side, other
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
    strand = s.ways
    found = [_product(each, strand, machine) for each in layer.products(s)]
    match layer:
        case specs.LinearSpec():
            (three,) = found
            (product,) = layer.products(s)
            at_rest = product.rows * product.n / s.further(layer.k_axis, layer.always_out)
            # The bias, and behind a block's last linear the residual stream.
            return _beside(three, 5 * at_rest * s.item, 3 * at_rest * s.item, strand, machine)
        case specs.AttentionSpec():
            return _attention(layer, s, machine)
        case specs.EmbeddingSpec():
            moved = s.rows() * layer.features / s.x * s.item
            return Seconds(memory_bound(machine.device, 2 * moved), 0.0, memory_bound(machine.device, 3 * moved), 3)
    if found:
        (three,) = found
        return three
    forward, backward, operators = _traffic(layer, s)
    each = strand * memory_bound(machine.device, forward / strand)
    return Seconds(each, strand * memory_bound(machine.device, backward / strand), 0.0, operators)


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
    rows, k, n, taps = product.rows / strands, product.k, product.n, product.taps
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


def _traffic(layer: LayerSpec, s: ParallelConfig) -> tuple[Any, Any, int]:
    """Bytes that memory-bound operators read and write, forward and backward, and how many operators a forward has."""
    match layer:
        case specs.NormSpec():
            numbers = s.rows() / s.further("y", layer.always) * layer.features / s.x
            # One fused operator where features are whole; otherwise several, in float32.
            wide = choose(s.x > 1, 6 * s.statistic, 2 * s.item)
            return numbers * wide, 2 * numbers * wide, 4
        case specs.PointwiseSpec():
            numbers = at_rest(layer, s)
            each = (layer.inputs + layer.outputs) * s.item
            return numbers * each, numbers * (each + layer.inputs * s.item), 2
        case specs.LossSpec():
            numbers = s.rows() * layer.classes / s.size("x", "y")
            return numbers * (s.item + 4 * s.statistic), numbers * (s.item + 3 * s.statistic), 8
        case specs.ImageNormSpec():
            numbers = own_samples(layer.side, s) * layer.pixels * layer.features / s.size(layer.side)
            return 4 * numbers * s.item, 8 * numbers * s.item, 4
        case specs.TableSpec():
            numbers = s.rows() / s.further("y") * layer.features / s.x
            return 3 * numbers * s.item, 3 * numbers * s.item, 3
    return 0.0 * s.x, 0.0 * s.x, 2


def at_rest(layer: specs.PointwiseSpec, s: ParallelConfig) -> Any:
    """Rows of a rank times the share of the features that it has."""
    if layer.whole:
        return s.samples_of
    across = other(layer.side)
    return s.rows(layer.pixels) / s.further(across, layer.always) / s.size(layer.side)


def own_samples(side: Side, s: ParallelConfig) -> Any:
    """Samples of one rank, of an activation whose features lie on this side."""
    return s.samples_of / s.further(other(side))
