"""Operations drawn at random between layers: where the check accepts them, the cut model computes what the serial one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from small_models import BATCH, CUT, SEQUENCE, Code, Transformer, attention, difference, on, without_values
from torch import Tensor
from torch.nn import functional

from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel import CutError, ShardingPolicy, resolve

# Each takes `[rows, features]` and gives as much. They look at it as `[samples, sequence, groups, in a group]`, in one of the
# ways to write that down, and do something there along some dimensions.
Step = tuple[str, int, int, int]
VIEWS = ["groups first", "groups of two", "halves", "rows"]


def seen(x: Tensor, view: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """As four dimensions, and the way back."""
    if view == "rows":
        return x[:, None, :, None], lambda y: y[:, 0, :, 0]
    sizes = {"groups first": (-1, 4), "groups of two": (-1, 2), "halves": (2, -1)}[view]
    return x.unflatten(0, (-1, SEQUENCE)).unflatten(-1, sizes), lambda y: y.flatten(2).flatten(0, 1)


def centred(x: Tensor, first: int, second: int) -> Tensor:
    return x - x.mean(sorted({first, second}), keepdim=True)


def exchanged(x: Tensor, first: int, second: int) -> Tensor:
    """Two dimensions in each other's place: of equal sizes, so that the result has the shape."""
    return x.transpose(first, second) if x.shape[first] == x.shape[second] else x.sigmoid()


def numbered(x: Tensor, first: int, second: int) -> Tensor:
    size = x.shape[first]
    places = torch.arange(size, device=x.device, dtype=x.dtype).view([size if dim == first else 1 for dim in range(4)])
    return x + 0.1 * places.expand_as(x)


def of_ones(x: Tensor, first: int, second: int) -> Tensor:
    shape = [size if dim in (first, second) else 1 for dim, size in enumerate(x.shape)]
    return x * (1 + torch.ones(shape, device=x.device, dtype=x.dtype))


def product(x: Tensor, first: int, second: int) -> Tensor:
    """Each row of one dimension against all rows, along another: attention without a softmax."""
    if first == second:
        return x.sin()
    rest = [dim for dim in range(4) if dim not in (first, second)]
    y = x.permute(*rest, first, second)
    mixed = (y @ y.transpose(-2, -1)) @ y / (1 + y.shape[-1])
    order = [*rest, first, second]
    return mixed.permute([order.index(dim) for dim in range(4)]).tanh()


def attended(x: Tensor, first: int, second: int) -> Tensor:
    if first == second:
        return x.cos()
    rest = [dim for dim in range(4) if dim not in (first, second)]
    order = [*rest, first, second]
    y = x.permute(order)
    mixed = functional.scaled_dot_product_attention(y, y.flip(-1), y, is_causal=True)
    return mixed.permute([order.index(dim) for dim in range(4)])


def parts(x: Tensor, first: int, second: int) -> Tensor:
    """Two halves of a dimension in the other order."""
    return torch.cat(x.chunk(2, first)[::-1], first)


def gated(x: Tensor, first: int, second: int) -> Tensor:
    return x * x.narrow(first, 0, 1).sigmoid()


def compared(x: Tensor, first: int, second: int) -> Tensor:
    """All of a dimension with all of it."""
    y = (x.unsqueeze(first) - x.unsqueeze(first + 1)).square()
    return x * (-y).exp().mean(first)


def assigned(x: Tensor, first: int, second: int) -> Tensor:
    out = torch.zeros_like(x)
    out.select(first, 0).copy_(x.select(first, -1))
    index: list[Any] = [slice(None)] * 4
    index[second] = 0
    out[tuple(index)] = x[tuple(index)].tanh()
    return out + x


def regrouped(x: Tensor, first: int, second: int) -> Tensor:
    """Through another order of the dimensions, viewed as one, and back."""
    y = x.movedim(first, second)
    return y.reshape(-1).view(y.shape).movedim(second, first)


def repeated(x: Tensor, first: int, second: int) -> Tensor:
    once = x.mean(first, keepdim=True)
    return x + once.repeat([size if dim == first else 1 for dim, size in enumerate(x.shape)]) * 0.5


OPERATIONS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "tanh": lambda x, *_: x.tanh(),
    "scaled": lambda x, first, _: x * x.shape[first] ** -0.5,
    "softmax": lambda x, first, _: x.softmax(first) * 3,
    "centred": centred,
    "normalised": lambda x, first, _: functional.normalize(x, dim=first, eps=0.1),
    "flipped": lambda x, first, _: x.flip(first),
    "rolled": lambda x, first, second: x.roll((1, 1), (first, second)),
    "summed": lambda x, first, _: x.cumsum(first) * 0.3,
    "largest": lambda x, first, _: x - 0.5 * x.amax(first, keepdim=True),
    "sorted": lambda x, first, _: x.sort(first)[0],
    "exchanged": exchanged,
    "numbered": numbered,
    "ones": of_ones,
    "product": product,
    "attended": attended,
    "halves": parts,
    "gated": gated,
    "compared": compared,
    "assigned": assigned,
    "regrouped": regrouped,
    "repeated": repeated,
}
steps = st.tuples(
    st.sampled_from(sorted(OPERATIONS)), st.sampled_from(range(len(VIEWS))), st.integers(0, 3), st.integers(0, 3)
)


def chain(drawn: tuple[Step, ...]) -> Code:
    def code(x: Tensor, *_: Any) -> Tensor:
        for name, view, first, second in drawn:
            there, back = seen(x, VIEWS[view])
            x = back(OPERATIONS[name](there, first, second))
        return x

    return code


def code_of(place: str, drawn: tuple[Step, ...]) -> dict[str, Code]:
    code = chain(drawn)
    return {place: (lambda qkv: attention(code(qkv))) if place == "core" else code}


def differences(grid: str, rest: Any, place: str, chains: list[tuple[Step, ...]]) -> list[float]:
    network = Network(on(grid))
    return [
        difference(Transformer, CUT, code_of(place, drawn), network, ShardingPolicy(activations=rest), unchecked=True)
        for drawn in chains
    ]


def accepted(grid: str, rest: Any, place: str, drawn: tuple[Step, ...]) -> bool:
    try:
        resolve(
            without_values(Transformer, code_of(place, drawn)), CUT, on(grid), ShardingPolicy(activations=rest), BATCH
        )
    except CutError:
        return False
    return True


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    grid=st.sampled_from(["x=2,y=2", "x=2", "y=2", "z=2", "x=2,z=2", "y=2,z=2"]),
    rest=st.sampled_from(["sharded", "replicated"]),
    place=st.sampled_from(["inner", "stream", "core", "logits"]),
    chains=st.lists(st.lists(steps, min_size=1, max_size=3).map(tuple), min_size=40, max_size=40),
)
def test_what_is_accepted_computes_what_the_serial_model_does(
    ranks: RankPool, grid: str, rest: str, place: str, chains: list[tuple[Step, ...]]
) -> None:
    """A batch of chains at a time, since a run of ranks takes as long as many of them."""
    right = [drawn for drawn in dict.fromkeys(chains) if accepted(grid, rest, place, drawn)]
    event(f"{len(right) // 5 * 5} and more of 40 accepted")
    for found in ranks.run(on(grid).world, differences, grid, rest, place, right):
        wrong = [drawn for drawn, each in zip(right, found, strict=True) if not each <= 1e-10]
        assert wrong == []


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(rest=st.sampled_from(["sharded", "replicated"]), drawn=steps, place=st.sampled_from(["inner", "stream"]))
def test_alone_on_a_device_everything_is_accepted(ranks: RankPool, rest: str, drawn: Step, place: str) -> None:
    assert accepted("x=1", rest, place, (drawn,))
