"""The layers at the edges of a network on images, where features are whole, and what joins tensors inside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.turns import interleave
from cubeloom.parallel import weave
from cubeloom.parallel.alike import all_parts_of, own_part_of
from cubeloom.parallel.collective import Collective
from cubeloom.parallel.forms import Spread, other
from cubeloom.parallel.image_forms import (
    ConcatForm,
    GroupedForm,
    ImageForm,
    JoinForm,
    ShareForm,
    SliceForm,
    SquaredLossForm,
    StayForm,
)
from cubeloom.parallel.loss import Mean, share_of
from cubeloom.parallel.norm import at_least_float32
from cubeloom.parallel.parameter import own_part
from cubeloom.parallel.products import Matmul, Product
from cubeloom.parallel.state import CubeState


class _Edge(nn.Module):
    """Parameters of which each rank holds its part for good: they are small, or used by its own samples only."""

    def __init__(
        self, form: ImageForm, state: CubeState, weight: nn.Parameter, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._state = state
        self._product = product

    def _compute(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self._state.local(self.weight), self._product)

    def _with_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self._product.bias(self._state.local(self.bias).to(y.dtype))


class CubeSlice(_Edge):
    """`[samples of z, K, …]` whole -> `[own samples, N/side, …]`."""

    def __init__(
        self, form: SliceForm, state: CubeState, weight: nn.Parameter, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__(form, state, weight, bias, product)
        across = state.network.axis(other(form.side))
        self._rows = own_part(across) if form.rows == Spread.ROWS else None
        # Where all ranks across have the same samples, each gives its share of one gradient.
        self._share = 1 / across.size if self._rows is None else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x if self._rows is None else self._rows(x)
        if x.requires_grad and self._share != 1:
            x = _Share.apply(x, self._share)
        return self._with_bias(self._compute(x))


class CubeJoin(_Edge):
    """`[own samples, K/side, …]` -> `[own samples, N, …]` whole."""

    def __init__(
        self, form: JoinForm, state: CubeState, weight: nn.Parameter, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__(form, state, weight, bias, product)
        self._sum = Collective("reduce", state.network.axis(form.side), form.name)

    def forward(self, x: Tensor) -> Tensor:
        return self._with_bias(self._sum(self._compute(x)))


class CubeStay(_Edge):
    """`[own samples, K/side, …]` -> `[own samples, N/side, …]`; where samples rest replicated, each rank takes its own."""

    def __init__(
        self, form: StayForm, state: CubeState, weight: nn.Parameter, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__(form, state, weight, bias, product)
        features = -1 if isinstance(product, Matmul) else 1
        self._scatter = Collective("scatter", state.network.axis(form.side), form.name, features)
        across = state.network.axis(other(form.side))
        self._across = across if form.rows == Spread.REPLICATED else None
        self._origin = form.name

    def forward(self, x: Tensor) -> Tensor:
        if self._across is not None:
            x = own_part_of(x, self._across, 0, f"{self._origin} input")
        y = self._scatter(self._compute(x))
        if self._across is not None:
            y = all_parts_of(y, self._across, 0, f"{self._origin} output")
        return self._with_bias(y)


class CubeGrouped(_Edge):
    """`[own samples, K/side, …]` -> `[own samples, N/side, …]`, by whole groups."""

    def __init__(
        self, form: GroupedForm, state: CubeState, weight: nn.Parameter, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__(form, state, weight, bias, product)

    def forward(self, x: Tensor) -> Tensor:
        return self._with_bias(self._compute(x))


class CubeShare(nn.Module):
    """Passes on what is whole; sums its gradient over the plane."""

    def __init__(self, form: ShareForm, state: CubeState) -> None:
        super().__init__()
        self._copy = Collective("copy", state.network.axis("x", "y"), form.name)

    def forward(self, whole: Tensor) -> Tensor:
        return self._copy(whole)


class CubeConcat(nn.Module):
    """Features of two tensors in turns; a rank has its share of the turns."""

    def __init__(self, form: ConcatForm, state: CubeState) -> None:
        super().__init__()
        self._turns = form.parts // state.network.axis(form.side).size

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return interleave(first, second, self._turns)


class CubeSquaredLoss(nn.Module):
    def __init__(self, form: SquaredLossForm, state: CubeState) -> None:
        super().__init__()
        network = state.network
        self._rows = own_part(network.axis(other(form.side))) if form.rows == Spread.ROWS else None
        self._everybody = network.axis(*form.row_axes)
        self._ranks = network.grid.data * network.grid.z
        self._origin = form.name
        self._shares = state.shares

    def count(self, target: Tensor) -> Tensor:
        """How many numbers are compared."""
        return target.new_full((), target.numel(), dtype=torch.float64)

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """`prediction` of the own samples, `target` of all samples of z."""
        target = target if self._rows is None else self._rows(target)
        total = (at_least_float32(prediction) - at_least_float32(target)).square().sum()
        count = total.new_full((), prediction.numel())
        return weave.meet(self._mean, total, count)

    def _mean(self, total: Tensor, count: Tensor) -> Tensor:
        mean = Mean.apply(total, count, self._everybody, self._ranks, self._origin)
        return share_of(mean, self._shares.get(self._origin))


class _Product(torch.autograd.Function):
    """A product of local blocks with both its gradients at once."""

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
    """Nothing, and a share of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.share, None
