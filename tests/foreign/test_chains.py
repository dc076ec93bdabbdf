"""What is found in a module, and what is left whole and why. No processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cubeloom
from cubeloom import Grid, UserError
from cubeloom.parallel import CutError
from cubeloom.parallel.foreign import Proposal
from cubeloom.parallel.foreign.trace import Example

from .toys import (
    INNER,
    WIDTH,
    Chain,
    Contradiction,
    Dropped,
    Fan,
    Gated,
    Hidden,
    Images,
    InPlace,
    Peeking,
    Remembered,
    Residual,
    Scaled,
    Softmax,
    Temperature,
    Twice,
)

PLANE = Grid(x=2, y=2)


def propose(module: nn.Module, grid: Grid = PLANE, *shape: int) -> Proposal:
    return cubeloom.cut(module, grid, {"x": torch.zeros(shape or (3, WIDTH))})


def refused(module: nn.Module, grid: Grid, example: Example) -> str:
    with pytest.raises(CutError) as caught:
        cubeloom.cut(module, grid, example)
    return str(caught.value)


def lies(proposal: Proposal) -> dict[str, str]:
    """Each cut layer as `[x>y]`: whole features at a bracket, cut ones without."""
    return {
        layer.name: f"{'[' * layer.enters}{layer.spec.k_axis}>{layer.spec.n_axis}{']' * layer.leaves}"
        for layer in proposal.layers
    }


def left(proposal: Proposal) -> dict[str, str]:
    return {each.name: each.why for each in proposal.whole}


def test_a_chain_expands_and_contracts() -> None:
    assert lies(propose(Chain())) == {"up": "[x>y", "down": "y>x]"}
    assert left(propose(Chain())) == {"gate": "the example does not call it"}


@pytest.mark.parametrize("module", [Gated(), InPlace()])
def test_two_layers_may_feed_one(module: nn.Module) -> None:
    assert lies(propose(module)) == {"up": "[x>y", "gate": "[x>y", "down": "y>x]"}


def test_a_chain_may_be_long_and_have_many_ends() -> None:
    assert lies(propose(Fan())) == {"up": "[x>y", "down": "y>x", "first": "x>y]", "second": "x>y]"}


@pytest.mark.parametrize(
    "module, why",
    [
        (Residual(), "its output goes into getitem"),
        (Softmax(), "its output goes into softmax"),
        (Scaled(), "its output meets a tensor that is whole, in mul"),
        (Temperature(), "its output meets a tensor that is whole, in mul"),
        (Dropped(0.1), "its output meets dropout with p=0.1"),
        (Hidden(), "its output is returned or kept"),
        (Remembered(), "its output is returned or kept"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_what_needs_whole_features_ends_a_chain(module: nn.Module, why: str) -> None:
    proposal = propose(module)
    assert lies(proposal) == {"up": "[x>y]", "down": "[x>y]"}
    assert proposal.layers[0].why == why


def test_dropout_of_nothing_does_not() -> None:
    assert lies(propose(Dropped(0.0))) == {"up": "[x>y", "down": "y>x]"}


def test_a_layer_that_is_used_twice_has_one_way_in_and_out() -> None:
    """Here `up` takes whole features once, so that it does always."""
    proposal = propose(Twice())
    assert lies(proposal) == {"up": "[x>y", "down": "y>x]"}
    assert [len(layer.calls) for layer in proposal.layers] == [2, 2]


def test_features_that_would_have_to_lie_on_both_sides_are_gathered() -> None:
    proposal = propose(Contradiction())
    assert lies(proposal) == {"up": "[x>y]", "gate": "[x>y]", "down": "[x>y]"}


def test_images_and_pooling() -> None:
    proposal = propose(Images(), PLANE, 2, 4, 6, 6)
    assert lies(proposal) == {"first": "[x>y", "second": "y>x", "wider": "x>y]", "head": "[x>y]"}
    assert "own samples" in left(proposal)["norm"]


def test_convolutions_without_a_form_are_left_whole() -> None:
    assert left(propose(Images(groups=2), PLANE, 2, 4, 6, 6))["second"] == "a convolution in 2 groups"
    assert "reflect" in left(propose(Images(padding_mode="reflect"), PLANE, 2, 4, 6, 6))["second"]


@pytest.mark.slow
def test_the_side_is_the_one_that_divides() -> None:
    narrow = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    example = {"input": torch.zeros(5, 3)}
    assert lies(cubeloom.cut(narrow, Grid(x=2), example)) == {"0": "[y>x", "2": "x>y]"}
    assert refused(narrow, PLANE, example) == (
        "Sequential on y=2,x=2: nothing would be cut along x and y (0: input features 3 cannot be cut over x=2; 2: output"
        " features 3 cannot be cut over y=2); grids that cut something: x=4; y=4; z=2,x=2. Ranks that only take"
        " other samples are `data`"
    )
    for grid in (Grid(x=4), Grid(y=4), Grid(z=2, x=2)):
        assert cubeloom.cut(narrow, grid, example).held < 67


def test_the_side_is_the_one_that_moves_less() -> None:
    wide = nn.Sequential(nn.Linear(4, 64), nn.Softmax(-1))
    example = {"input": torch.zeros(5, 4)}
    assert lies(cubeloom.cut(wide, Grid(x=2), example)) == {"0": "[y>x]"}  # gathers 64 features; x>y] would sum them
    assert lies(cubeloom.cut(wide, Grid(y=2), example)) == {"0": "[x>y]"}


def test_a_weight_that_z_does_not_divide_is_not_cut_over_z() -> None:
    odd = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))
    proposal = cubeloom.cut(odd, Grid(y=2, z=2), {"input": torch.zeros(5, 4)})
    assert [layer.sharded for layer in proposal.layers] == [False, True]
    assert "not cut over z" in str(proposal)


@pytest.mark.slow
def test_an_axis_that_cuts_nothing_is_refused() -> None:
    """Its ranks would hold, and on x and y compute, the same."""
    odd = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 5))
    example = {"input": torch.zeros(5, 4)}
    assert "along z (weights that z does not divide)" in refused(odd, Grid(z=2), example)
    assert "along x and z (0: input features 5" in refused(
        nn.Sequential(nn.Linear(5, 9)), Grid(x=2, z=2), {"input": torch.zeros(2, 5)}
    )
    assert not cubeloom.cut(odd, Grid(data=2), example).layers
    words = refused(nn.Sequential(nn.LayerNorm(4)), PLANE, example)
    assert "along x and y (0: LayerNorm has no form here); no grid near it does" in words


class Recentred(Chain):
    """In training, features of the chain meet each other."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h - h.mean(-1, keepdim=True) if self.training else h)


def test_a_branch_of_training_is_looked_at() -> None:
    calls = propose(Recentred()).layers[0].calls
    assert lies(propose(Recentred())) == {"up": "[x>y]", "down": "[x>y]"}
    assert lies(propose(Recentred().eval())) == {"up": "[x>y", "down": "y>x]"}
    assert len(calls) == 1  # a pass has one, however often it was looked at


@pytest.mark.slow
def test_shared_frozen_and_hooked_layers_are_left_whole() -> None:
    tied = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8, bias=False))
    tied[1].weight = tied[0].weight
    words = refused(tied, PLANE, {"input": torch.zeros(2, 3, dtype=torch.long)})
    assert "(1: it shares a parameter with 0; 0: it shares a parameter with 1)" in words
    frozen, hooked = Chain(), Chain()
    frozen.up.weight.requires_grad_(False)
    hooked.down.register_forward_hook(lambda *_: None)
    assert left(propose(frozen))["up"] == "it is frozen"
    assert left(propose(hooked))["down"] == "it has hooks"
    assert lies(propose(hooked)) == {"up": "[x>y]"}
    assert left(propose(Peeking()))["up"] == "its parameters are used outside of it"


def test_a_strange_call_is_left_whole() -> None:
    lone = nn.Sequential(nn.Linear(WIDTH, INNER))
    flat = refused(lone, PLANE, lambda _: lone[0](torch.zeros(WIDTH)))
    assert "(0: its input has 1 dimensions)" in flat
    named = refused(lone, PLANE, lambda _: lone[0](input=torch.zeros(1, WIDTH)))
    assert "(0: it is called with more than its input)" in named
    assert "(it: it is the model itself)" in refused(lone[0], PLANE, {"input": torch.zeros(1, WIDTH)})


def test_looking_leaves_no_trace() -> None:
    module = Images()
    module.norm.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    proposal = propose(module, PLANE, 2, 4, 6, 6)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert drawn == torch.rand(1)
    assert module.training and not module.norm.training
    assert not any(each._forward_hooks for each in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with torch.device("meta"):
        assert propose(Images(), PLANE, 2, 4, 6, 6) == proposal


def test_refusals() -> None:
    with pytest.raises(UserError, match="pipe=2"):
        propose(Chain(), Grid(pipe=2))
    with pytest.raises(CutError, match="_flat_weights"):
        cubeloom.cut(nn.LSTM(4, 4), PLANE, {"input": torch.zeros(2, 3, 4)})
    assert not propose(Chain(), Grid(data=2)).layers


def test_the_report_says_what_and_what_it_costs() -> None:
    repeated = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)) for _ in range(3)))
    words = str(cubeloom.cut(repeated, PLANE, {"input": torch.zeros(2, 8)}))
    assert "*.*" in words and "×3" in words
    assert "its output goes into softmax" in words
    assert "a rank holds" in words and "data parallelism on 4 ranks" in words
