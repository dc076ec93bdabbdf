"""Gradients after `backward()` are those of the mean over the whole batch, whatever happened before and whoever used what."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cubeloom import Grid
from cubeloom.base.errors import UserError
from cubeloom.base.initial import Constant, Initial, Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import build, cut_of
from cubeloom.parallel import (
    Batch,
    Contract,
    Cut,
    Expand,
    Given,
    Loss,
    Norm,
    Replicated,
    ShardingPolicy,
    apply,
    initial_values,
    materialise,
)
from cubeloom.parallel.gradients import Gradients, WeightGradient
from cubeloom.parallel.layout import Layout
from cubeloom.parallel.parameter import block_of, local_of
from cubeloom.parallel.products import add_to
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from grids import rest_is_long

SAMPLES = 8
X = torch.linspace(-1, 1, SAMPLES * 16, dtype=torch.float64).sin().view(SAMPLES, 16)
Y = torch.arange(SAMPLES) % 24


class Own(nn.Module):
    """A user's model: two layers, a norm and a head, with a loss of its own or ours."""

    cut: ClassVar[Cut] = {
        "up": Expand(),
        "down": Contract(),
        "norm": Norm(),
        "head": Expand(sharded_output=True),
        "loss": Loss(),
    }

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.head(self.norm(self.down(torch.relu(self.up(x))))), y)
        return loss

    def initial(self, name: str) -> Initial:
        return Constant(1.0 if "norm" in name else 0.0) if name.endswith("bias") or "norm" in name else Normal(0.3)


class Experts(Own):
    """Each rank's samples choose one of three layers. The last is never used."""

    cut: ClassVar[Cut] = {"experts.*": Replicated()}

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.experts = nn.ModuleList(nn.Linear(16, 24) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # A loss that the cut does not know: the mean over the samples that this rank has.
        parts = [self.experts[int(chosen)](row[None]) for row, chosen in zip(x, y < 4, strict=True)]
        return nn.functional.cross_entropy(torch.cat(parts), y)


class ShardedExperts(Own):
    cut: ClassVar[Cut] = {"experts.*": Expand(), "loss": Loss()}

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.experts = nn.ModuleList(nn.Linear(16, 24) for _ in range(2))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.experts[int(y[0] >= 4)](x), y)
        return loss


def made(kind: type[Own], grid: Grid | None, dtype: torch.dtype = torch.float64, **rest: Any) -> tuple[Own, Any, Any]:
    with torch.device("meta"):
        model = kind()
    fill = initial_values(model, 0, dtype)
    if grid is None:
        materialise(model, fill)
        return model, None, None
    network = Network(grid)
    # Which expert is used depends on values, of which nothing is known before: those tests answer for their models.
    state = apply(
        model,
        kind.cut,
        network,
        Batch(SAMPLES, 1),
        fill,
        ShardingPolicy(**rest),
        example=given,
        unchecked=kind is not Own,
    )
    return model, state, network


def given(samples: int) -> dict[str, Any]:
    """The model's first layer is given activations, each rank its part of their rows and features."""
    x = torch.empty(samples, 16, device="meta")
    return {"x": Given(x, Layout.of(rows=("data", "z", "y"), features="x")), "y": torch.empty(samples).long()}


def mine(network: Network | None) -> tuple[Tensor, Tensor]:
    """This rank's samples, and its part of their features and rows where the model's first layer takes them so."""
    if network is None:
        return X, Y
    x, y = network.share(X), network.share(Y)
    here, grid = network.coordinates, network.grid
    rows = len(x) // grid.y
    return x[here["y"] * rows :][:rows].chunk(grid.x, 1)[here["x"]], y


def difference(model: nn.Module, serial: nn.Module, network: Network) -> float:
    """The largest of this rank's gradients from the serial ones; infinite where one of the two is missing."""
    found = 0.0
    for (_, parameter), (_, whole) in zip(model.named_parameters(), serial.named_parameters(), strict=True):
        if parameter.grad is None or whole.grad is None:
            found = max(found, 0.0 if parameter.grad is whole.grad else float("inf"))
            continue
        expected = whole.grad[block_of(parameter, network).slices]
        found = max(found, (local_of(parameter.grad) - expected).abs().max().item())
    return found


# --- C3: losses that the user writes ---


def total(model: Own, x: Tensor, y: Tensor) -> Tensor:
    """With penalties on a weight that is cut and on one that is replicated."""
    weights = (model.up.weight, model.norm.weight)
    squares = [each.square().sum() for each in weights]
    wholes = [each.full_tensor() if isinstance(each, DTensor) else each for each in squares]
    loss: Tensor = model(x, y) + 0.1 * wholes[0] + 0.2 * wholes[1]
    return loss


def with_penalties(grid: Grid) -> float:
    serial, _, _ = made(Own, None)
    total(serial, *mine(None)).backward()
    model, _, network = made(Own, grid)
    total(model, *mine(network)).backward()
    return difference(model, serial, network)


@pytest.mark.parametrize("grid", ["data=2", "z=2", "x=2,y=2", "data=2,z=2", "y=2,z=2"])
def test_penalties_count_once(ranks: RankPool, grid: str) -> None:
    on = Grid.parse(grid)
    assert max(ranks.run(on.world, with_penalties, on)) < 1e-12


def auxiliary(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss and a second one on what is inside, each the mean over the samples at hand."""
    hidden = model.get_submodule("experts.0")(x)
    return nn.functional.cross_entropy(hidden, y) + 0.3 * hidden.square().mean()


def with_auxiliary_loss(grid: Grid) -> float:
    serial, _, _ = made(Experts, None)
    auxiliary(serial, X, Y).backward()
    model, _, network = made(Experts, grid)
    auxiliary(model, network.share(X), network.share(Y)).backward()
    return difference(model, serial, network)


@pytest.mark.parametrize("grid", ["data=2", "z=2,y=2", "data=2,x=2"])
def test_losses_of_a_user_are_means_over_the_batch(ranks: RankPool, grid: str) -> None:
    on = Grid.parse(grid)
    assert max(ranks.run(on.world, with_auxiliary_loss, on)) < 1e-12


# --- C15: ranks that use different modules ---


def with_experts(grid: Grid, bucket: int) -> tuple[float, list[str]]:
    serial, _, _ = made(Experts, None)
    serial(X, Y).backward()
    model, state, network = made(Experts, grid)
    state.gradients.buckets.limit = bucket
    model(network.share(X), network.share(Y)).backward()
    unused = [name for name, each in model.named_parameters() if each.grad is None]
    return difference(model, serial, network), unused


@pytest.mark.parametrize("bucket", [1, 2**20])
def test_a_rank_that_did_not_use_a_module_gives_zeros(ranks: RankPool, bucket: int) -> None:
    """The first four samples choose one expert and the others another, so that no rank of data uses both."""
    for found, unused in ranks.run(2, with_experts, Grid(data=2), bucket):
        assert found < 1e-12
        assert unused == ["experts.2.weight", "experts.2.bias"]


def with_sharded_experts(grid: Grid) -> str:
    model, _, network = made(ShardedExperts, grid)
    try:
        model(network.share(X), network.share(Y)).backward()
    except UserError as error:
        return str(error)
    return ""


def test_ranks_of_z_must_use_the_same_sharded_weights(ranks: RankPool) -> None:
    for found in ranks.run(2, with_sharded_experts, Grid(z=2)):
        assert "rank 0 gathered experts.0 where rank 1 gathered experts.1" in found


# --- C2: weights that change ---

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "single": partial(torch.optim.AdamW, foreach=False),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
}


def losses(grid: Grid | None, optimizer: str, weights: str, before: bool) -> list[float]:
    """Of some steps; in the middle values are assigned and a state is loaded."""
    model, _, network = made(Own, grid, weights=weights)
    update = OPTIMIZERS[optimizer](model.parameters(), lr=0.05)
    data = mine(network)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if before:
        model(*data)  # with a graph that nobody runs back
        with torch.no_grad():
            model(*data)
    found = []
    for step in range(6):
        update.zero_grad()
        loss = model(*data)
        loss.backward()
        update.step()
        found.append(loss.item())
        if step == 2:
            with torch.no_grad():
                model.up.weight.mul_(0.5)
        if step == 3:
            model.load_state_dict(state)
        if step == 4:
            with torch.no_grad():
                model.up(data[0])  # starts to gather the next layer's weight, which then changes
                model.down.weight.mul_(0.5)
    return found


@pytest.mark.parametrize(
    ("optimizer", "weights"),
    rest_is_long(
        [(optimizer, weights) for optimizer in OPTIMIZERS for weights in ("kept", "freed")],
        [("single", "kept"), ("foreach", "freed"), ("fused", "kept"), ("fused", "freed")],
    ),
)
def test_gathered_weights_never_outlive_an_update(ranks: RankPool, optimizer: str, weights: str) -> None:
    (expected,) = ranks.run(1, losses, None, optimizer, weights, False)
    for before in (False, True):
        for found in ranks.run(2, losses, Grid(z=2), optimizer, weights, before):
            assert found == pytest.approx(expected, abs=1e-10)


def changed_in_between(grid: Grid, weights: str, name: str, fused: bool) -> str:
    model, _, network = made(Own, grid, weights=weights)
    loss = model(*mine(network))
    parameter = model.get_parameter(name)
    if fused:
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        torch.optim.AdamW([parameter], lr=0.1, fused=True).step()
    else:
        with torch.no_grad():
            parameter.mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["down.weight", "norm.weight"])
@pytest.mark.parametrize(("weights", "fused"), [("kept", False), ("freed", True), ("replicated", True)])
def test_a_weight_that_changed_before_its_backward_is_refused(
    ranks: RankPool, name: str, weights: str, fused: bool
) -> None:
    for found in ranks.run(2, changed_in_between, Grid(z=2), weights, name, fused):
        # Ours, or torch's own where it has saved the parameter.
        assert "was changed between a forward and its backward" in found or "modified by an inplace operation" in found


# --- C14: what happens to a model ---


def treated(grid: Grid, treatment: str) -> float:
    serial, _, _ = made(Own, None)
    serial(X, Y).backward()
    model, _, network = made(Own, grid)
    run: Callable[..., Tensor] = model
    if treatment == "to":
        model.to("cpu")
    elif treatment == "deepcopy":
        original, model = model, copy.deepcopy(model)
        run = model
        with torch.no_grad():
            original.up.weight.zero_()  # the copy has values of its own
    elif treatment == "compile":
        run = torch.compile(model, backend="eager")
    elif treatment == "load":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    run(*mine(network)).backward()
    return difference(model, serial, network)


@pytest.mark.parametrize(
    ("treatment", "grid"),
    rest_is_long(
        [(treatment, grid) for treatment in ("to", "deepcopy", "compile", "load") for grid in ("data=2", "x=2,z=2")],
        [("to", "data=2"), ("to", "x=2,z=2"), ("deepcopy", "x=2,z=2"), ("load", "x=2,z=2")],
    ),
)
def test_gradients_are_reduced_whatever_was_done_to_the_model(ranks: RankPool, treatment: str, grid: str) -> None:
    on = Grid.parse(grid)
    assert max(ranks.run(on.world, treated, on, treatment)) < 1e-12


def cast_or_replaced(grid: Grid) -> tuple[float, str]:
    model, _, network = made(Own, grid)
    model(*mine(network)).backward()
    wide = [local_of(each.grad).clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    model.float()
    x, y = mine(network)
    model(x.float(), y).backward()
    narrow = [local_of(each.grad) for each in model.parameters() if each.grad is not None]
    far = max((a - b).abs().max().item() for a, b in zip(wide, narrow, strict=True))
    model.load_state_dict(model.state_dict(), assign=True)
    try:
        model(x.float(), y)
    except UserError as error:
        return far, str(error)
    return far, ""


def test_a_model_can_be_cast_and_parameters_that_were_replaced_are_refused(ranks: RankPool) -> None:
    for far, refused in ranks.run(2, cast_or_replaced, Grid(data=2)):
        assert 0 < far < 1e-6
        assert "load_state_dict(assign=True)" in refused


# --- R6: a backward that fails ---


def after_a_failure(grid: Grid) -> float:
    serial, _, _ = made(Own, None)
    serial(X, Y).backward()
    model, _, network = made(Own, grid)

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    hook = model.up.register_forward_hook(lambda module, given, result: (result.register_hook(fail), None)[1])
    with pytest.raises(ValueError, match="on purpose"):
        model(*mine(network)).backward()
    hook.remove()
    model.zero_grad()
    model(*mine(network)).backward()
    return difference(model, serial, network)


@pytest.mark.parametrize("grid", ["data=2", "z=2", "x=2,y=2"])
def test_after_a_backward_that_failed_the_next_is_exact(ranks: RankPool, grid: str) -> None:
    on = Grid.parse(grid)
    assert max(ranks.run(on.world, after_a_failure, on)) < 1e-12


def run_back_twice(grid: Grid) -> float:
    """A graph that is kept and run back once more, together with a new one."""
    serial, _, _ = made(Own, None)
    model, _, network = made(Own, grid)
    for each, data in ((serial, mine(None)), (model, mine(network))):
        first = each(*data)
        first.backward(retain_graph=True)
        each.zero_grad()
        (first + 2 * each(*data)).backward()
    return difference(model, serial, network)


def test_a_graph_can_be_run_back_once_more(ranks: RankPool) -> None:
    assert max(ranks.run(2, run_back_twice, Grid(data=2))) < 1e-12


# --- C10: sums of gradients ---


def summed(gradients: Any, count: int) -> tuple[float, torch.dtype]:
    """How far bfloat16's gradients of many micro-batches are from their sum in float64, relative to its norm."""
    network = Network(Grid(data=2))
    with torch.device("meta"):
        model = build("gpt-tiny")
    fill = initial_values(model, 0, torch.bfloat16)
    batch = Batch(2 * count, 8)
    pipeline = Pipeline(
        model, cut_of(model), network, batch, fill, generate("1f1b", 1, count), ShardingPolicy(gradients=gradients)
    )
    expected: dict[nn.Parameter, Tensor] = {}
    compute = Gradients.weight_gradient

    def noting(self: Gradients, wanted: WeightGradient) -> None:
        # As the products are in float32: what is asked here is how they are summed.
        found = wanted.product(None, torch.float32)
        exact = found.double()
        expected[wanted.parameter] = expected.get(wanted.parameter, torch.zeros_like(exact)) + exact
        # A head's can be asked for once only: it scales in place what it has found.
        once = replace(wanted, product=lambda into, _: add_to(into, found)) if wanted.layer == "head" else wanted
        compute(self, once)

    for parameter in pipeline.parameters.values():
        parameter.grad_dtype = torch.float32
    pipeline.gradients.weight_gradient = noting.__get__(pipeline.gradients)  # type: ignore[method-assign]
    tokens = network.share(torch.arange(2 * count * 9).view(2 * count, 9) * 7 % 384)
    pipeline.step({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
    worst, dtype = 0.0, torch.float32
    for parameter, own in expected.items():
        assert parameter.grad is not None
        both = network.axis("data").all_reduce(own, "expected").wait() / 2
        worst = max(worst, ((local_of(parameter.grad).double() - both).norm() / both.norm()).item())
        dtype = pipeline.gradients.dtype_of(parameter)
    return worst, dtype


@pytest.mark.slow
def test_gradients_of_many_micro_batches_are_summed_in_float32(ranks: RankPool) -> None:
    for worst, dtype in ranks.run(2, summed, "float32", 128):
        assert worst < 1e-6 and dtype is torch.float32


def test_or_in_the_model_s_dtype_where_that_is_asked_for(ranks: RankPool) -> None:
    for worst, dtype in ranks.run(2, summed, "model", 16):
        assert worst > 1e-4 and dtype is torch.bfloat16


def bytes_of(grid: Grid, gradients: Any) -> Mapping[str, Any]:
    model, _, network = made(Own, grid, torch.bfloat16, gradients=gradients)
    x, y = mine(network)
    with network.recording() as ledger:
        model(x.bfloat16(), y).backward()
    return {axis: float(size) for axis, size in ledger.by_axis().items()}


def test_float32_sums_of_bfloat16_gradients_move_twice_the_bytes(ranks: RankPool) -> None:
    wide, narrow = (ranks.run(2, bytes_of, Grid(data=2), each)[0]["data"] for each in ("float32", "model"))
    loss = 2 * 4 * 1  # a sum and a count, in float32
    assert wide - loss == 2 * (narrow - loss)


def _dtypes_of_products(count: int, data: int, masters: bool) -> set[tuple[str, torch.dtype]]:
    """The layers whose weight gradients were computed, and in which dtype, in a step of bfloat16."""
    network = Network(Grid(data=data))
    with torch.device("meta"):
        model = build("gpt-tiny")
    fill = initial_values(model, 0, torch.bfloat16)
    pipeline = Pipeline(model, cut_of(model), network, Batch(2 * count, 8), fill, generate("1f1b", 1, count))
    for parameter in pipeline.parameters.values() if masters else ():
        parameter.grad_dtype = torch.float32
    asked = set()
    compute = Gradients.weight_gradient

    def noting(self: Gradients, wanted: WeightGradient) -> None:
        def product(into: Tensor | None, dtype: torch.dtype) -> Tensor:
            asked.add((wanted.layer.rpartition(".")[2], dtype))
            return wanted.product(into, dtype)

        compute(self, replace(wanted, product=product))

    tokens = torch.arange(16 * count).view(2 * count, 8) % 50
    with patch.object(Gradients, "weight_gradient", noting):
        pipeline.step({"tokens": network.share(tokens), "targets": network.share(tokens)})
    return asked


@pytest.mark.parametrize(("count", "data", "masters"), [(1, 1, False), (2, 1, False), (2, 2, False), (1, 1, True)])
def test_a_product_that_is_the_gradient_is_rounded_once(ranks: RankPool, count: int, data: int, masters: bool) -> None:
    """In one pass, and not by a copy; where sums follow, they are in float32."""
    for asked in ranks.run(data, _dtypes_of_products, count, data, masters):
        of_layers = {dtype for layer, dtype in asked if layer in ("qkv", "up", "down")}
        alone = count == data == 1 and not masters
        assert of_layers == {torch.bfloat16 if alone else torch.float32}
        # The table of tokens is the head's too: two products are summed.
        assert {dtype for layer, dtype in asked if layer == "head"} == {torch.float32}
        assert ("lookup", torch.float32) in asked
