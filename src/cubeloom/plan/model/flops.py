"""Multiplications and additions of the model itself, whatever a grid computes twice or again."""

from __future__ import annotations

from cubeloom.plan.model import layers as plan


def flops(model: plan.Model, sequence: int) -> float:
    """Of one sample: forward, and twice as much for the gradients. Attention is counted in full, causal or not, as is usual."""
    return 3.0 * sum(_layer(layer, sequence) for kind in model.row for layer in model.kinds[kind].layers)


def parameters(model: plan.Model) -> int:
    """Of the linears, convolutions and tables; norms and biases are left out."""
    found = 0
    for kind in model.row:
        for layer in model.kinds[kind].layers:
            match layer:
                case plan.Linear(shares=None):
                    found += layer.k * layer.n * layer.taps
                case plan.Edge():
                    found += layer.k * layer.n * layer.taps // layer.groups
                case plan.Whole():
                    found += layer.k * layer.n
                case plan.Embedding() | plan.Table():
                    found += layer.entries * layer.features
    return found


def _layer(layer: plan.Any, sequence: int) -> float:
    match layer:
        case plan.Linear():
            return 2.0 * layer.k * layer.n * layer.taps * (layer.pixels[1] if layer.pixels else sequence)
        case plan.Edge():
            return 2.0 * layer.k * layer.n * layer.taps / layer.groups * layer.pixels[1]
        case plan.Whole():
            return 2.0 * layer.k * layer.n
        case plan.Attention():
            length = sequence if layer.length is None else layer.length
            return 4.0 * length * length * layer.heads * layer.head_dim
    return 0.0
