"""Layers at the edges of an image network, where features are whole, and layers that join tensors inside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base.turns import interleave
from cubeloom.comm.batch import Mean
from cubeloom.parallel import weave
from cubeloom.parallel.collective import Collective
from cubeloom.parallel.layers.alike import all_parts_of, own_part_of
from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.layers.loss import share_of
from cubeloom.parallel.layers.norm import at_least_float32
from cubeloom.parallel.parameter import own_part
from cubeloom.parallel.products import Convolution, Matmul, Product, product_of, sizes
from cubeloom.parallel.specs import (
    ConcatSpec,
    CopyToRegionSpec,
    EdgeSpec,
    FeedForwardSpec,
    ReplicatedSpec,
    Side,
    SquaredLossSpec,
    other,
    rows_of,
)
from cubeloom.parallel.state import CubeState


@dataclass(frozen=True)
class Replicated(Declared):
    """A small layer that every rank of x and y computes in full on replicated input."""

    def spec(self, name: str, module: nn.Module, seen: Seen) -> ReplicatedSpec | None:
        if not isinstance(module, nn.Linear):
            return None
        return ReplicatedSpec(name=name, k=module.in_features, n=module.out_features, bias=module.bias is not None)


@dataclass(frozen=True)
class ColwiseFromReplicated(Declared):
    """A linear or convolution from replicated features (few, or small) to features on `side`."""

    side: Side = "x"

    def spec(self, name: str, module: nn.Module, seen: Seen) -> EdgeSpec | None:
        return _edge(name, module, seen, "colwise", self.side)


@dataclass(frozen=True)
class RowwiseToReplicated(Declared):
    """A linear or convolution from features on `side` to few features, replicated on every rank of the side."""

    side: Side = "x"

    def spec(self, name: str, module: nn.Module, seen: Seen) -> EdgeSpec | None:
        return _edge(name, module, seen, "rowwise", self.side)


@dataclass(frozen=True)
class RowwiseScatter(Declared):
    """A small linear or convolution, such as a skip connection's, from features on `side` to features on `side`.

    Each rank computes all output features from its input features, for its own samples.
    """

    side: Side = "x"

    def spec(self, name: str, module: nn.Module, seen: Seen) -> EdgeSpec | None:
        return _edge(name, module, seen, "rowwise_scatter", self.side)


@dataclass(frozen=True)
class Grouped(Declared):
    """A grouped convolution, from features on `side` to features on `side`: each rank has whole groups."""

    side: Side = "x"

    def spec(self, name: str, module: nn.Module, seen: Seen) -> EdgeSpec | None:
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return None
        return _edge(name, module, seen, "grouped", self.side)


@dataclass(frozen=True)
class CopyToRegion(Declared):
    """A module whose whole output is the input of many `ColwiseFromReplicated`: their gradients are summed here, once.

    The module must be element-wise: an activation function, or nn.Identity.
    """

    features: int

    def spec(self, name: str, module: nn.Module, seen: Seen) -> CopyToRegionSpec:
        return CopyToRegionSpec(name=name, features=self.features)


@dataclass(frozen=True)
class Concat(Declared):
    """A module that joins the features of two tensors on `side`, in `turns` (`base.turns.interleave`)."""

    side: Side = "x"
    turns: int = 1

    def spec(self, name: str, module: nn.Module, seen: Seen) -> ConcatSpec:
        return ConcatSpec(name=name, side=self.side, turns=self.turns)


@dataclass(frozen=True)
class FeedForward(Declared):
    """A module that calls a linear layer, GELU and a linear layer, by these names in it, and then the others in order.

    The linear layers have their own declarations. If blocks are compiled as a whole on a GPU, GELU is fused into the
    matmuls.
    """

    layers: tuple[str, str, str] = ("up", "act", "down")
    then: tuple[str, ...] = ("dropout",)

    def spec(self, name: str, module: nn.Module, seen: Seen) -> FeedForwardSpec | None:
        names = (*self.layers, *self.then)
        return FeedForwardSpec(name=name, layers=self.layers, then=self.then) if _calls(module, names) else None


def _calls(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(name in dict(module.named_children()) for name in names)


@dataclass(frozen=True)
class SquaredLoss(Declared):
    """The mean squared error of features that every rank of `side` has whole."""

    side: Side = "x"

    def spec(self, name: str, module: nn.Module, seen: Seen) -> SquaredLossSpec:
        return SquaredLossSpec(name=name, side=self.side)


EdgeKind = Literal["colwise", "rowwise", "rowwise_scatter", "grouped"]


def _edge(name: str, module: nn.Module, seen: Seen, kind: EdgeKind, side: Side) -> EdgeSpec | None:
    if not isinstance(module, nn.Linear | Convolution) or (
        kind in ("rowwise", "rowwise_scatter") and seen.pixels is None
    ):
        return None
    if kind == "grouped":
        assert isinstance(module, Convolution)
        n, k, *window = module.weight.shape
        k, kernel_numel, groups = k * module.groups, math.prod(window), module.groups
    else:
        (k, n, kernel_numel), groups = sizes(name, module), 1
    return EdgeSpec(
        name=name,
        kind=kind,
        side=side,
        k=k,
        n=n,
        kernel_numel=kernel_numel,
        bias=module.bias is not None,
        pixels=seen.pixels or (1, 1),
        groups=groups,
        transposed=bool(getattr(module, "transposed", False)),
    )


class CubeEdge(nn.Module):
    """A layer of whose parameters each rank keeps a fixed part: they are small, or used by its own samples only.

    - colwise: `[samples of z, K, …]` whole -> `[own samples, N/side, …]`;
    - rowwise: `[own samples, K/side, …]` -> `[own samples, N, …]` whole;
    - rowwise_scatter: `[own samples, K/side, …]` -> `[own samples, N/side, …]`; if activations are replicated, each
      rank takes its own samples;
    - grouped: `[own samples, K/side, …]` -> `[own samples, N/side, …]`, by whole groups.
    """

    def __init__(
        self, spec: EdgeSpec, state: CubeState, weight: nn.Parameter, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._state = state
        self._product = product
        self._kind = spec.kind
        self._name = spec.name
        self._side, self._across = (state.network.axis(side) for side in (spec.side, other(spec.side)))
        self._sharded = bool(state.config.sharded)

    def forward(self, x: Tensor) -> Tensor:
        match self._kind:
            case "colwise":
                y = self._compute(self._own_rows(x))
            case "rowwise":
                y = Collective("reduce", self._side, self._name)(self._compute(x))
            case "rowwise_scatter":
                y = self._stay(x)
            case "grouped":
                y = self._compute(x)
            case _:
                assert_never(self._kind)
        return y if self.bias is None else y + self._product.bias(self._state.local(self.bias).to(y.dtype))

    def _compute(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self._state.local(self.weight), self._product)

    def _own_rows(self, x: Tensor) -> Tensor:
        if self._sharded:
            return own_part(self._across)(x)
        # All ranks of the other axis have the same samples: each contributes its share of one gradient.
        return _Share.apply(x, 1 / self._across.size) if x.requires_grad and self._across.size > 1 else x

    def _stay(self, x: Tensor) -> Tensor:
        if not self._sharded:
            x = own_part_of(x, self._across, 0, f"{self._name} input")
        features = -1 if isinstance(self._product, Matmul) else 1
        y = Collective("scatter", self._side, self._name, features)(self._compute(x))
        return y if self._sharded else all_parts_of(y, self._across, 0, f"{self._name} output")


@make_layer.register
def _(spec: EdgeSpec, making: Making) -> nn.Module:
    weight = making.parameter("weight")
    assert weight is not None
    groups = spec.groups // making.state.network.axis(spec.side).size if spec.kind == "grouped" else 1
    product = product_of(making.plain, groups)
    return CubeEdge(spec, making.state, weight, making.parameter("bias"), product)


class CubeCopyToRegion(nn.Module):
    """Applies an element-wise function to whole features; all-reduces their gradient over the plane."""

    def __init__(self, spec: CopyToRegionSpec, state: CubeState, function: nn.Module) -> None:
        super().__init__()
        self._copy = Collective("copy", state.network.axis("x", "y"), spec.name)
        self._function = function

    def forward(self, whole: Tensor) -> Tensor:
        return self._copy(self._function(whole))


class CubeConcat(nn.Module):
    """Interleaves the features of two tensors; a rank has its share of the turns."""

    def __init__(self, spec: ConcatSpec, state: CubeState) -> None:
        super().__init__()
        self._turns = spec.turns // state.network.axis(spec.side).size

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return interleave(first, second, self._turns)


class CubeSquaredLoss(nn.Module):
    def __init__(self, spec: SquaredLossSpec, state: CubeState) -> None:
        super().__init__()
        network = state.network
        sharded = bool(state.config.sharded)
        self._rows = own_part(network.axis(other(spec.side))) if sharded else None
        self._everybody = network.axis(*rows_of(spec.side, sharded))
        self._ranks = network.grid.data * network.grid.z
        self._origin = spec.name
        self._shares = state.shares

    def count(self, target: Tensor) -> Tensor:
        """The number of elements that are compared."""
        return target.new_full((), target.numel(), dtype=torch.float64)

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """`prediction` has this rank's samples, `target` all samples of its z rank."""
        target = target if self._rows is None else self._rows(target)
        total = (at_least_float32(prediction) - at_least_float32(target)).square().sum()
        count = total.new_full((), prediction.numel())
        return weave.meet(self._mean, total, count)

    def _mean(self, total: Tensor, count: Tensor) -> Tensor:
        mean = Mean.apply(total, count, self._everybody, self._ranks, self._origin)
        return share_of(mean, self._shares.get(self._origin))


class _Product(torch.autograd.Function):
    """A product of local blocks that computes both its gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Product) -> Tensor:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.product = product
        return product.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        dx = ctx.product.input_gradient(gradient, weight, x.shape) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = ctx.product.weight_gradient(gradient, x, weight.shape, None, weight.dtype)
        return dx, dw, None


class _Share(torch.autograd.Function):
    """The identity in the forward, a share of the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.share, None


class CubeReplicated(nn.Module):
    """`[rows of z, K]` whole -> `[rows of z, N]` whole, computed by every rank of x and y."""

    def __init__(self, state: CubeState, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._state = state

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self._state.local(self.bias)
        return functional.linear(x, self._state.local(self.weight), bias)


@make_layer.register
def _(spec: ReplicatedSpec, making: Making) -> nn.Module:
    weight = making.parameter("weight")
    assert weight is not None
    return CubeReplicated(making.state, weight, making.parameter("bias"))


@make_layer.register
def _(spec: CopyToRegionSpec, making: Making) -> nn.Module:
    return CubeCopyToRegion(spec, making.state, making.plain)


@make_layer.register
def _(spec: ConcatSpec, making: Making) -> nn.Module:
    return CubeConcat(spec, making.state)


@make_layer.register
def _(spec: SquaredLossSpec, making: Making) -> nn.Module:
    return CubeSquaredLoss(spec, making.state)
