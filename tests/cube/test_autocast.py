"""Under autocast to bfloat16: statistics of norms in float32 at least, as torch's; a head and its loss in one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cubeloom import Grid
from cubeloom.base.initial import Constant, Initial, Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.parallel import Batch, Given, Norm, ShardingPolicy, apply, initial_values, materialise
from cubeloom.parallel import layers as declared
from cubeloom.parallel.layers.head import CubeHead
from cubeloom.parallel.layout import Layout

NORMS = {
    "layer": lambda: nn.LayerNorm(24),
    "root": lambda: nn.RMSNorm(24),
    "groups": lambda: nn.GroupNorm(3, 24),  # the second lies on both ranks
    "groups of one rank": lambda: nn.GroupNorm(4, 24),
    "batch": lambda: nn.BatchNorm2d(24),
}


class One(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def initial(self, name: str) -> Initial:
        return Normal(1.0) if name.endswith("weight") else Constant(0.5)


def normed(kind: str, dtype: torch.dtype) -> tuple[float, float, float]:
    """How far result and input gradient are from torch's; and how far torch's from what it gives without autocast."""
    network = Network(Grid(x=2))
    images = kind not in ("layer", "root")
    torch.manual_seed(0)
    x = (torch.randn(4, 24, 8, 8) if images else torch.randn(64, 24)) + 5  # far from zero, where digits are lost
    x, slope = x.to(dtype), torch.randn_like(x)
    with torch.device("meta"):
        plain, model = One(NORMS[kind]()), One(NORMS[kind]())
    fill = initial_values(plain, 0, torch.float32)
    materialise(plain, fill)
    cut: declared.Cut = {"norm": Norm(side="x") if images else Norm()}
    laid = Layout.of(rows=None, features="x", **dict.fromkeys(("height", "width") if images else (), ()))
    apply(
        model,
        cut,
        network,
        Batch(4, 16),
        fill,
        ShardingPolicy(activations="replicated"),
        example=lambda _: {"x": Given(x, laid)},
    )

    def own(features: Tensor) -> Tensor:
        return features.chunk(2, 1)[network.coordinates["x"]]

    results = []
    for module, enabled in ((plain, True), (model, True), (plain, False)):
        given = (own(x) if module is model else x).clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = module(given)
        y.backward((own(slope) if module is model else slope).to(y.dtype))  # of the sum over all ranks' parts
        assert given.grad is not None
        results.append([(each if module is model else own(each)).detach().float() for each in (y, given.grad)])
    whole, mine, full = results
    return difference(mine[0], whole[0]), difference(mine[1], whole[1]), difference(whole[0], full[0])


def difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_those_of_torch(kind: str, dtype: torch.dtype, tolerance: float, ranks: RankPool) -> None:
    for result, gradient, rounded in ranks.run(2, normed, kind, dtype):
        assert result <= tolerance and gradient <= 2 * tolerance
        assert rounded <= tolerance


GPT = GPTConfig(vocab=24, positions=8, hidden=16, layers=1, heads=2)


def fused(device: str) -> tuple[bool, float, float, float]:
    """Whether the head's steps ran under autocast; its loss and the norm of its weight's gradient, and by how much that
    differs from that of a head and then a loss."""
    network = Network(Grid(), torch.device(device))
    tokens = torch.arange(32, device=device).view(4, 8) % 24
    seen: list[bool] = []
    losses, gradients = [], []
    for apart in (False, True):
        with torch.device("meta"):
            model = build(GPT)
        apply(model, cut_of(model), network, Batch(4, 8), initial_values(model, 0, torch.float32, network.device))
        assert isinstance(model.head, CubeHead)
        alone = model.head._steps.alone

        def noted(*given: object, alone: object = alone) -> object:
            seen.append(torch.is_autocast_enabled(device))
            return alone(*given)  # type: ignore[operator]

        object.__setattr__(model.head._steps, "alone", noted)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model.loss(model(tokens), tokens.flatten()) if apart else model(tokens, tokens)
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.embed.weight.grad.full_tensor().double())  # type: ignore[union-attr]
    return any(seen) or not seen, *losses, difference(*gradients)


def test_a_head_and_its_loss_in_one(ranks: RankPool) -> None:
    """On a CPU autocast leaves the softmax alone that it widens on a GPU: that it is off is all that shows here."""
    ((under_autocast, loss, apart, off),) = ranks.run(1, fused, "cpu")
    assert not under_autocast
    assert loss == pytest.approx(apart, rel=1e-2) and off < 3e-2
