"""FLOPs of the model itself, without what a grid computes redundantly or recomputes."""

from __future__ import annotations

from cubeloom.parallel.specs import EdgeSpec, EmbeddingSpec, LinearSpec, ReplicatedSpec, TableSpec
from cubeloom.plan.model.model import Model


def flops(model: Model, sequence: int) -> float:
    """For one sample: forward, and twice as much for the gradients. Attention counts in full, causal or not, as is
    usual.
    """
    return 3.0 * sum(layer.flops(sequence) for kind in model.row for layer in model.kinds[kind].layers)


def parameters(model: Model) -> int:
    """Of linears, convolutions and tables, without norms and biases."""
    found = 0
    for kind in model.row:
        for layer in model.kinds[kind].layers:
            match layer:
                case LinearSpec(shares=None):
                    found += layer.k * layer.n * layer.kernel_numel
                case EdgeSpec():
                    found += layer.k * layer.n * layer.kernel_numel // layer.groups
                case ReplicatedSpec():
                    found += layer.k * layer.n
                case EmbeddingSpec() | TableSpec():
                    found += layer.entries * layer.features
    return found
