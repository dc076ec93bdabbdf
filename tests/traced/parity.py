"""A traced module beside its serial self, on one rank of a grid."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor, nn

import cubeloom
from cubeloom.comm import Network
from cubeloom.parallel.arranged import lie_of
from cubeloom.parallel.parameter import local_of

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Difference:
    loss: float
    gradients: float
    missing: set[str]  # gradients that one of the two has
    buffers: float  # after as many passes
    counted: dict[str, Fraction]
    predicted: dict[str, Fraction]

    def check(self, name: str) -> None:
        assert self.loss < 1e-10, name
        assert self.gradients < 1e-10, name
        assert not self.missing, name
        assert self.counted == self.predicted, name


def compare(
    network: Network,
    serial: nn.Module,
    batch: Batch,
    loss_of: Loss,
    passes: int = 1,
    plan: Mapping[str, str] | None = None,
) -> Difference:
    """The whole batch in the serial module, and the rank's own in a cut copy; bytes are those of the last pass."""
    model = copy.deepcopy(serial)
    expected = loss_of(serial, batch)
    expected.backward()
    mine = {key: network.share(value) for key, value in batch.items()}
    report = cubeloom.parallelize(model, network, example=mine, plan=plan)
    for _ in range(passes):
        model.zero_grad()
        with network.recording() as ledger:
            loss = loss_of(model, mine)
            loss.backward()
    wanted, found = ({key: each.grad for key, each in some.named_parameters()} for some in (serial, model))
    return Difference(
        abs(loss.item() - expected.item()),
        largest_difference(model, found, wanted, network),
        {key for key in wanted if (wanted[key] is None) != (found[key] is None)},
        largest_of_buffers(model, serial),
        {axis: size for axis, size in ledger.by_axis().items() if size},
        report.volume(),
    )


def largest_of_buffers(model: nn.Module, serial: nn.Module) -> float:
    """Of those that are stored: others may be cut."""
    buffers = dict(model.named_buffers())
    pairs = [(each, buffers[name]) for name, each in serial.named_buffers() if name in serial.state_dict()]
    return max(((one - two).abs().max().item() for one, two in pairs), default=0.0)


def largest_difference(
    model: nn.Module, found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], network: Network
) -> float:
    """Of this rank's blocks from the same blocks of whole tensors, relative to the largest number of each.

    Some gradients are nothing but rounding, such as those of the keys' biases in attention: hence the least scale.
    """
    differences = [0.0]
    for name, parameter in model.named_parameters():
        block, whole = found[name], wanted[name]
        if block is None or whole is None:
            continue
        lie = lie_of(parameter, network)
        scale = max(whole.abs().max().item(), 1e-6)
        for run, rows in lie.parts(local_of(block)):
            where = tuple(
                slice(start, start + size) for start, size in zip(lie.offset_of(run), rows.shape, strict=True)
            )
            differences.append((rows - whole[where]).abs().max().item() / scale)
    return max(differences)
