"""Strands: turns, meetings, failures, and what torch keeps for a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cubeloom import UserError
from cubeloom.parallel.weave import Weave, meet, pause, place, recompute, strand


def test_one_way_is_the_function_itself() -> None:
    x = torch.arange(3.0)
    assert Weave(lambda x: x, ways=1)(x) is x


def test_strands_take_turns_in_a_fixed_order() -> None:
    said: list[str] = []

    def talk(x: Tensor) -> Tensor:
        for word in "abc":
            said.append(f"{place()[0]}{word}")
            pause()
        return x

    Weave(talk, ways=2)(torch.zeros(4))
    assert " ".join(said) == "0a 1a 0b 1b 0c 1c"
    said.clear()
    Weave(talk, ways=3, stagger=True)(torch.zeros(3))
    assert " ".join(said) == "0a 0b 1a 0c 1b 2a 1c 2b 2c"


def test_arguments_are_cut_and_results_joined() -> None:
    def double(x: Tensor, *, also: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        assert len(x) == 2 and len(also["y"]) == 1 and name == "plain"
        return {"x": 2 * x, "y": also["y"]}

    x, y = torch.arange(4.0), torch.arange(2.0)
    found = Weave(double, ways=2)(x, also={"y": y}, name="plain")
    assert torch.equal(found["x"], 2 * x) and torch.equal(found["y"], y)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UserError, match=r"shape \[3\] cannot be cut into 2 strands"):
        Weave(lambda x: x, ways=2)(torch.zeros(3))
    with pytest.raises(UserError, match="ways must be at least 1"):
        Weave(lambda x: x, ways=0)


def test_strands_meet_in_one_sum_of_one_graph() -> None:
    calls: list[Tensor] = []

    def root(total: Tensor) -> Tensor:
        calls.append(total)
        return total.sqrt()

    def loss(x: Tensor) -> Tensor:
        if place()[0] == 0:
            pause()  # whoever comes first
        return meet(root, x.sum())

    x = torch.tensor([4.0, 5.0, 7.0, 9.0], requires_grad=True)
    found = Weave(loss, ways=4)(x)
    found.backward()
    assert found.item() == 5 and len(calls) == 1
    assert x.grad is not None and x.grad.tolist() == pytest.approx([0.1] * 4)


@pytest.mark.parametrize("loss", [lambda x: x.mean(), lambda x: {"loss": x.mean()}, lambda x: x.mean().item()])
def test_a_number_that_strands_do_not_have_in_common_is_refused(loss: Callable[[Tensor], object]) -> None:
    """One strand's mean is not the mean of all, and its gradients are those of its own samples."""
    with pytest.raises(UserError, match=r"different numbers, \[0.5, 2.5\].* take the mean outside, .* or `weave.meet`"):
        Weave(loss, ways=2)(torch.arange(4.0, requires_grad=True))


def test_numbers_computed_from_what_strands_have_in_common_are_taken() -> None:
    def loss(x: Tensor) -> Tensor:
        return 2 * meet(lambda total: total, x.sum())

    x = torch.arange(4.0, requires_grad=True)
    found = Weave(loss, ways=2)(x)
    found.backward()
    assert found.item() == 12 and x.grad is not None and x.grad.tolist() == [2.0] * 4
    assert Weave(loss, ways=2)(torch.full((4,), torch.nan)).isnan()


def test_what_strands_agreed_on_is_there_when_they_are_computed_once_more() -> None:
    """Also where what is recomputed recomputes a part of itself. Its gradients are those of the whole."""

    def centred(x: Tensor) -> Tensor:
        mean = meet(lambda total: total / 4, x.sum())
        return (x - mean).exp()

    def twice(x: Tensor) -> Tensor:
        return recompute(centred, recompute(centred, x).sin()).cos()

    x = torch.tensor([0.1, 0.5, 0.9, 0.2], dtype=torch.float64, requires_grad=True)
    gradients: list[Tensor] = []
    for ways, function in ((1, twice), (2, twice), (4, partial(recompute, twice))):
        x.grad = None
        weights = torch.arange(4.0, dtype=torch.float64)
        (Weave(function, ways)(x) * weights).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.clone())
    for each in gradients[1:]:
        assert torch.allclose(each, gradients[0], rtol=0, atol=1e-14)


def test_outside_a_weave_nothing_happens() -> None:
    pause()
    assert strand() is None and place() == (0, 1)
    assert meet(lambda x: 2 * x, torch.ones(())).item() == 2


@pytest.fixture
def torn() -> Iterator[list[str]]:
    """What strands did on their way out."""
    yield []


def test_a_failure_in_one_strand_ends_all_and_leaves_nothing_behind(torn: list[str]) -> None:
    def fail(x: Tensor) -> Tensor:
        with torch.no_grad():
            try:
                pause()
                if place()[0] == 1:
                    raise ZeroDivisionError("strand 1")
                pause()
            finally:
                torn.append(f"{place()[0]} out")
        return x

    with pytest.raises(ZeroDivisionError, match="strand 1"):
        Weave(fail, ways=3)(torch.zeros(3))
    assert sorted(torn) == ["0 out", "1 out", "2 out"]
    assert torch.is_grad_enabled() and strand() is None
    assert torch.equal(Weave(lambda x: x + 1, ways=3)(torch.zeros(3)), torch.ones(3))


def test_autocast_and_grad_mode_stay_with_their_strand() -> None:
    def one_of_two(x: Tensor) -> Tensor:
        if place()[0] == 0:
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                pause()
                assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
                pause()
        else:
            assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
            pause()
            assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
        return x

    Weave(one_of_two, ways=2)(torch.zeros(2))
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


@pytest.mark.parametrize("again", [recompute, lambda function, x: checkpoint(function, x, use_reentrant=False)])
def test_blocks_that_are_computed_again_keep_their_hooks_to_themselves(again) -> None:  # type: ignore[no-untyped-def]
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        h = torch.tanh(x @ weight)
        pause()
        return torch.tanh(h @ weight)

    x = torch.randn(4, 3, dtype=torch.float64)
    block(x).sum().backward()
    assert weight.grad is not None
    serial, weight.grad = weight.grad, None
    Weave(lambda x: meet(lambda total: total, again(block, x).sum()), ways=2)(x).backward()
    assert weight.grad is not None and torch.allclose(weight.grad, serial, rtol=0, atol=1e-12)


def test_a_recomputation_knows_its_strand() -> None:
    seen: list[int] = []

    def block(x: Tensor) -> Tensor:
        seen.append(place()[0])
        return x.exp()

    x = torch.zeros(2, requires_grad=True)
    Weave(lambda x: meet(lambda total: total, recompute(block, x).sum()), ways=2)(x).backward()
    assert seen == [0, 1, 1, 0]
