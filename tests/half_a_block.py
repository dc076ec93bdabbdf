"""A layer, GELU and a layer, for the tests of how they are computed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cubeloom.cube.feed_forward import feed_forward


class Half(nn.Module):
    """The second half of a block."""

    def __init__(self, features: int, approximate: str = "tanh", bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features, bias)
        self.act = nn.GELU(approximate)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + feed_forward(self.norm(x), self.up, self.act, self.down)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Of the input and all parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    run(x).square().sum().backward()
    found = [each.grad for each in (x, *model.parameters())]
    assert all(each is not None for each in found)
    return [each.clone() for each in found if each is not None]
