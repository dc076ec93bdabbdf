"""The closed form of a GPT's training step as Megatron-LM runs it: tensor axis innermost, then data, then pipe; 1F1B;
activations recomputed; gradients summed at the end of the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cubeloom.plan.costs import Quantity, all_reduce, matmul, memory_bound, send
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.validate.table import Floats, Runs

_BYTES = 2  # fp16
_VOCABULARY = 51200  # GPT-2's 50257, padded so that any tensor axis cuts it
_FORWARDS = 4  # a layer's forward, the same again in the backward, and twice its work for the gradients
_REDUCTIONS = 6  # all-reduces of the tensor axis in a layer: two in each forward, two in the backward
_LAYER_OPERATORS, _HEAD_OPERATORS = 150, 90  # issued by the host, one at a time
_SCORES = 1 / 4  # an attention score is touched as often as an activation, for so many passes
_SOFTNESS = 3  # host and device take turns to be late: between the sum (1) and the larger of the two (∞)


@dataclass(frozen=True)
class Constants:
    """What is fitted: of the device and the cluster, and how much a layer and the optimizer read and write."""

    cluster: Cluster
    passes: float = 50.0  # over a layer's activations, forward and backward, by operators that only read and write
    optimizer_bytes: float = 40.0  # a parameter


def step_seconds(constants: Constants, runs: Runs) -> Floats:
    """Seconds of one step of each run."""
    microbatches = runs.batch / (runs.data * runs.microbatch)
    stage = _layer(constants, runs) * runs.layers / runs.pipe + _messages(constants.cluster, runs)
    last = stage + _head(constants, runs)
    pipeline = (runs.pipe - 1) * stage + microbatches * last  # fills once, then its slowest stage sets the pace
    return np.asarray(pipeline + _update(constants, runs), float)


def _layer(constants: Constants, runs: Runs) -> Quantity:
    """Forward and backward of a micro-batch through one layer."""
    cluster, device = constants.cluster, constants.cluster.device
    rows, h, tensor = runs.microbatch * runs.sequence, runs.hidden, runs.tensor
    heads, each = runs.microbatch * runs.heads / tensor, h / runs.heads
    products = (
        matmul(device, rows, 3 * h / tensor, h, "fp16")
        + matmul(device, runs.sequence, runs.sequence, each, "fp16", heads)
        + matmul(device, runs.sequence, each, runs.sequence, "fp16", heads)
        + matmul(device, rows, h, h / tensor, "fp16")
        + matmul(device, rows, 4 * h / tensor, h, "fp16")
        + matmul(device, rows, h, 4 * h / tensor, "fp16")
    )
    # Half of what lies between the products is cut over the tensor axis, half is whole on each of its ranks.
    touched = rows * h * (0.5 + 0.5 / tensor) + _SCORES * heads * runs.sequence**2
    computing = _FORWARDS * products + memory_bound(device, constants.passes * touched * _BYTES)
    reducing = _REDUCTIONS * all_reduce(cluster, _BYTES * rows * h, tensor)
    return _later(computing, _LAYER_OPERATORS * device.host) + reducing


def _head(constants: Constants, runs: Runs) -> Quantity:
    """The product with the vocabulary and the loss, which the last stage has to do besides its layers."""
    cluster, device = constants.cluster, constants.cluster.device
    rows, share = runs.microbatch * runs.sequence, _VOCABULARY / runs.tensor
    computing = 3 * matmul(device, rows, share, runs.hidden, "fp16")
    computing = computing + memory_bound(device, constants.passes * rows * share * _BYTES)
    reducing = 2 * all_reduce(cluster, _BYTES * rows * runs.hidden, runs.tensor)
    return _later(computing, _HEAD_OPERATORS * device.host) + reducing


def _messages(cluster: Cluster, runs: Runs) -> Quantity:
    """A micro-batch's activations to the next stage and their gradients back; each tensor rank sends its share."""
    share = _BYTES * runs.microbatch * runs.sequence * runs.hidden / runs.tensor
    return 2 * send(cluster, share, runs.pipe, runs.tensor * runs.data)


def _update(constants: Constants, runs: Runs) -> Quantity:
    """Sum the gradients over the data axis, and those of the tied embedding over first and last stage; then the optimizer."""
    cluster, h, tensor = constants.cluster, runs.hidden, runs.tensor
    embedding = _VOCABULARY * h / tensor
    parameters = 12 * h**2 * runs.layers / (runs.pipe * tensor) + embedding
    return (
        all_reduce(cluster, _BYTES * parameters, runs.data, tensor)
        + all_reduce(cluster, _BYTES * embedding, np.minimum(runs.pipe, 2), tensor * runs.data)
        + memory_bound(cluster.device, constants.optimizer_bytes * parameters)
    )


def _later(device: Quantity, host: float) -> Quantity:
    return (device**_SOFTNESS + host**_SOFTNESS) ** (1 / _SOFTNESS)
