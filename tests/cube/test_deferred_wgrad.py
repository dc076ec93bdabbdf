"""Which layers of a block are tapped, and what their kernel_numel give."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cubeloom.parallel.deferred_wgrad import DeferredWgradBlock, DeferredWgradLinear
from half_a_block import gradients, tapped_gradients


def tapped(block: nn.Module, x: Tensor) -> DeferredWgradBlock:
    return DeferredWgradBlock.of(block, dict(block.named_parameters()), (x,))


def test_layers_are_measured_as_they_are_called() -> None:
    found = tapped(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)), torch.ones(5, 3, 4))
    shapes = {layer: tuple(each.shape for each in own.values()) for layer, own in found.tokens.items()}
    assert shapes == {"0": ((5, 3, 4), (5, 3, 6)), "2": ((5, 3, 6), (5, 3, 2))}
    assert [type(layer) for layer in found.block.children()] == [DeferredWgradLinear, nn.GELU, DeferredWgradLinear]


def test_the_block_itself_stays_as_it_is() -> None:
    block = nn.Sequential(nn.Linear(4, 4))
    tapped(block, torch.ones(3, 4))
    assert type(block[0]) is nn.Linear
    assert not block[0]._forward_hooks


class Twice(nn.Module):
    """Calls a layer twice, of which the second product of its weight's gradient is another one; and one once."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.once(self.twice(self.twice(x)))


def test_layers_that_are_not_called_just_once_are_not_tapped() -> None:
    assert tapped(Twice(), torch.ones(3, 4)).tokens.keys() == {"once"}


def test_layers_that_share_a_weight_are_not_tapped() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    block[2].weight = block[0].weight
    assert tapped(block, torch.ones(3, 4)).tokens.keys() == {"1"}


def test_taps_give_what_a_weight_gradient_is_the_product_of() -> None:
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)).double(), torch.randn(5, 4).double()
    found = tapped_gradients(block, lambda run: run, x)
    torch.testing.assert_close(found, gradients(block, block, x), rtol=1e-13, atol=1e-13)
