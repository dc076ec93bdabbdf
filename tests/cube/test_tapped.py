"""Which layers of a block are tapped, and what their taps give."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cubeloom.cube.tapped import TOKENS, Tapped, TappedLinear


def tapped(block: nn.Module, x: Tensor) -> Tapped:
    return Tapped.of(block, dict(block.named_parameters()), (x,))


def test_layers_are_measured_as_they_are_called() -> None:
    found = tapped(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)), torch.ones(5, 3, 4))
    assert found.shapes == {"0": ((5, 3, 4), (5, 3, 6)), "2": ((5, 3, 6), (5, 3, 2))}
    assert [type(layer) for layer in found.block.children()] == [TappedLinear, nn.GELU, TappedLinear]


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
    assert tapped(Twice(), torch.ones(3, 4)).shapes.keys() == {"once"}


def test_layers_that_share_a_weight_are_not_tapped() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    block[2].weight = block[0].weight
    assert tapped(block, torch.ones(3, 4)).shapes.keys() == {"1"}


def test_taps_give_what_a_weight_gradient_is_the_product_of() -> None:
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)).double(), torch.randn(5, 4).double()
    found = tapped(block, x)
    tokens = {
        f"{layer}.{token}": torch.zeros(shape, dtype=x.dtype, requires_grad=True)
        for layer, shapes in found.shapes.items()
        for token, shape in zip(TOKENS, shapes, strict=True)
    }
    values = {name: each.detach() for name, each in block.named_parameters()}
    functional_call(found.block, {**values, **tokens}, (x,)).square().sum().backward()
    block(x).square().sum().backward()
    for layer in found.shapes:
        of_input, of_output = (tokens[f"{layer}.{token}"].grad for token in TOKENS)
        expected = block.get_parameter(f"{layer}.weight").grad
        assert of_input is not None and of_output is not None and expected is not None
        torch.testing.assert_close(of_output.t() @ of_input, expected, rtol=1e-13, atol=1e-13)
