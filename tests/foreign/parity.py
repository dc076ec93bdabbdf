"""A cut module beside its serial self, on one rank of a grid."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import cubeloom
from cubeloom.comm import Network
from cubeloom.comm.network import CUBE
from cubeloom.parallel.foreign import mean_over_batch
from cubeloom.parallel.parameter import local_of

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Difference:
    loss: float
    gradients: float
    missing: set[str]  # gradients that one of the two has
    counted: dict[str, Fraction]
    predicted: dict[str, Fraction]

    def check(self, name: str) -> None:
        assert self.loss < 1e-10, name
        assert self.gradients < 1e-10, name
        assert not self.missing, name
        assert self.counted == self.predicted, name


def compare(network: Network, serial: nn.Module, batch: Batch, loss_of: Loss, passes: int = 1) -> Difference:
    """The whole batch in the serial module, and the rank's own in a cut copy; bytes are those of the last pass."""
    model = copy.deepcopy(serial)
    expected = loss_of(serial, batch)
    expected.backward()
    mine = {key: network.share(value) for key, value in batch.items()}
    proposal = cubeloom.cut(model, network.grid, lambda module: loss_of(module, mine))
    state = proposal.apply(model, network)
    for _ in range(passes):
        model.zero_grad()
        with network.recording() as ledger:
            loss = mean_over_batch(loss_of(model, mine), state)
            loss.backward()
    wanted, found = ({key: each.grad for key, each in some.named_parameters()} for some in (serial, model))
    return Difference(
        abs(loss.item() - expected.item()),
        largest_difference(found, wanted, network),
        {key for key in wanted if (wanted[key] is None) != (found[key] is None)},
        ledger.by_axis(),
        proposal.volume(),
    )


def largest_difference(
    found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], network: Network
) -> float:
    """Of this rank's blocks from the same blocks of whole tensors, relative to the largest number of each.

    Some gradients are nothing but rounding, such as those of the keys' biases in attention: hence the least scale.
    """
    differences = [0.0]
    for name, block in found.items():
        whole = wanted[name]
        if block is not None and whole is not None:
            own = own_block(whole, block, network) if isinstance(block, DTensor) else whole
            here = local_of(block) if isinstance(block, DTensor) else block
            scale = max(whole.abs().max().item(), 1e-6)
            differences.append((here - own).abs().max().item() / scale)
    return max(differences)


def own_block(whole: Tensor, like: DTensor, network: Network) -> Tensor:
    for axis, placement in zip(CUBE, like.placements, strict=True):
        if isinstance(placement, Shard):
            whole = whole.chunk(network.grid.size(axis), placement.dim)[network.coordinates[axis]]
    return whole
