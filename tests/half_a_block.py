"""A layer, GELU and a layer, for the tests of how they are computed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call

from cubeloom.parallel.deferred_wgrad import DeferredWgradBlock
from cubeloom.parallel.feed_forward import feed_forward


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
    return gradients_of(model, x)


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [each.grad for each in (x, *model.parameters())]
    assert all(each is not None for each in found)
    return [each.clone() for each in found if each is not None]


def tapped_gradients(model: nn.Module, compiler: Callable[..., Callable[..., Tensor]], x: Tensor) -> list[Tensor]:
    """The same, of a tapped block: here, weight gradients are computed right behind the backward."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    given: dict[str, Tensor] = dict(model.named_parameters())
    tapped = DeferredWgradBlock.of(model, given, (x,))
    tokens: dict[str, tuple[Tensor, ...]] = {}
    for layer, own in tapped.tokens.items():
        weight = given[f"{layer}.weight"] = given[f"{layer}.weight"].detach()
        tokens[layer] = tuple(weight.new_zeros(()).expand(each.shape).requires_grad_() for each in own.values())
        given |= zip((f"{layer}.{token}" for token in own), tokens[layer], strict=True)
    run = compiler(lambda x, given: functional_call(tapped.block, given, (x,)))
    run(x, given).square().sum().backward()
    for layer, (of_input, of_output) in tokens.items():
        assert of_input.grad is not None and of_output.grad is not None
        parameter = model.get_parameter(f"{layer}.weight")
        assert parameter.grad is None
        parameter.grad = of_output.grad.t() @ of_input.grad
    return gradients_of(model, x)
