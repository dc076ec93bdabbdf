"""The linear layer: one matmul on the cube, whatever the world calls its setting. A convolution is one over pixels.

Shapes of `Y[M,N] = X[M,K] · W[K,N]` on one rank, for an expand (k lies on x, n on y; a contract exchanges them):

    X at rest  [M/(z·y), K/x]   rows sharded, or [M/z, K/x] replicated over y, or [M/z, K/(x·y)] features sharded
    X          [M/z, K/x]       gathered along n
    W at rest  [N/(y·z), K/x]   gathered along z: [N/y, K/x]
    Y partial  [M/z, N/y]       a summand along k
    Y at rest  [M/(z·x), N/y]   scattered by rows, or [M/z, N/y] all-reduced, or [M/z, N/(y·x)] scattered by features
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.comm import Axis, Pending
from cubeloom.parallel import weave
from cubeloom.parallel.collective import Collective, Kind
from cubeloom.parallel.forms import LinearForm, Spread
from cubeloom.parallel.gradients import Gradients, WeightGradient
from cubeloom.parallel.padding import own_classes
from cubeloom.parallel.parameter import Version, check_unchanged, local_of, own_part, version_of
from cubeloom.parallel.products import Product, add_to
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.turn import Turn
from cubeloom.parallel.weight import Weight


class CubeLinear(nn.Module):
    """A linear, or a convolution: `product` is what is computed on local blocks."""

    def __init__(
        self, form: LinearForm, state: CubeState, weight: Weight, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__()
        self._product = product
        self.weight = weight.parameter
        self.bias = bias
        self._state = state
        self._gathered = weight
        along_n = state.network.axis(form.n_axis)
        along_k = state.network.axis(form.k_axis)
        self._input = _collective(form.inputs, "copy", "gather", along_n, f"{form.name} input")
        self._output = _collective(form.outputs, "reduce", "scatter", along_k, f"{form.name} output")
        self._regather = form.saved == "regathered" and form.inputs != Spread.REPLICATED and along_n.size > 1
        self._own_features = own_part(along_k) if form.outputs == Spread.FEATURES else None
        # Rows are gathered before one matmul and scattered after another: a strand that waits between them has its turn here.
        between = form.inputs == Spread.ROWS and along_n.size > 1 and along_k.size == 1
        # With nothing to wait for in the plane, strands would run one after the other, and hold all gathered weights between.
        alone = weight.sharded and along_n.size == along_k.size == 1
        self._lone_matmul = between or alone
        # Nothing happens to the product but that a bias is added: then the matmul adds it.
        self._adds_bias = bias is not None and along_k.size == 1 and not form.turn
        self._name = form.name
        self._turn = Turn(form.name, state.network, form.k_axis) if form.turn else None
        self._own_classes = own_classes(form, state.network.grid, along_n.index)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # before it travels
        started = self._input.start(x)
        # Made between the two nodes of the input's collective: so in the backward the weight gradient is computed while
        # the input gradient travels.
        regather = self._input if self._regather else None
        call = _Call(self._name, self._product, self._gathered, self._state.gradients, regather, weave.place()[1])
        if not self._state.updates_under_way:
            call.version = version_of(self.weight)
        behind = self._state.hides_weight_gradients
        bias = self.bias if self._adds_bias else None
        token = _WeightGradient.apply(self.weight, bias, call) if behind else None
        # The first layer of a model may have an input that wants no gradient. Without a graph nobody knows.
        needed = x.requires_grad if torch.is_grad_enabled() else None
        weight = self._gathered.forward(self._name, backward_needs_it=needed)
        if needed and self._gathered.keeps:
            call.kept = weight
        whole = started.finish()
        if token is None:
            token = _WeightGradient.apply(self.weight, bias, call)
        partial = _Matmul.apply(whole, x.detach() if self._regather else None, token, weight, bias, call)
        self._gathered.read("forward", call.ways)
        if self._lone_matmul:
            weave.pause()
        y = self._output(partial)
        if self._turn is not None:
            y = self._turn(y)
        if self.bias is not None and not self._adds_bias:
            added = self._state.local(self.bias).to(y.dtype)
            y = y + self._product.bias(added if self._own_features is None else self._own_features(added))
        return y if self._own_classes is None else y.narrow(-1, 0, self._own_classes)


def _collective(spread: Spread, replicated: Kind, sharded: Kind, axis: Axis, origin: str) -> Collective:
    kind = replicated if spread == Spread.REPLICATED else sharded
    # What is summed comes out of this layer's own matmuls: Y in the forward, dX in the backward.
    return Collective(kind, axis, origin, dim=-1 if spread == Spread.FEATURES else 0, over=True)


@dataclass
class _Call:
    """One use of the layer: what its nodes hand to one another in the backward."""

    layer: str
    product: Product
    weight: Weight
    gradients: Gradients
    regather: Collective | None
    ways: int  # strands that use the layer alike
    operands: tuple[Pending, Tensor] | None = None  # X and dY of the weight gradient
    version: Version | None = None  # of the weight in the forward, where it may not change until the backward
    kept: Tensor | None = None  # the gathered weight, where it is kept until the backward


class _WeightGradient(torch.autograd.Function):
    """In the backward: dW = dYᵀ X, after the matmul's node has left the operands, or put off; and that of the bias."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, bias: nn.Parameter | None, call: _Call) -> Tensor:
        ctx.parameter, ctx.bias, ctx.call = parameter, bias, call
        ctx.uses = [call.gradients.use(each) for each in (parameter, bias) if each is not None]
        # The token carries the graph, not values: the weight has its gradient's shape, and is there already.
        token = local_of(parameter)
        rows, *rest = token.shape
        ctx.shape = torch.Size([rows * call.weight.parts, *rest])  # gathered
        return token

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None]:
        call: _Call = ctx.call
        assert call.operands is not None
        (x, gradient), call.operands = call.operands, None

        gradients, weight = call.gradients, call.weight

        def product(into: Tensor | None) -> Tensor:
            return call.product.weight_gradient(gradient, x.wait(), ctx.shape, into, gradients.dtype_of(ctx.parameter))

        def bias_product(into: Tensor | None) -> Tensor:
            return add_to(into, call.product.bias_gradient(gradient, gradients.dtype_of(ctx.bias)))

        strands = call.ways if weight.sharded else 1
        if ctx.needs_input_grad[0]:
            gradients.weight_gradient(WeightGradient(ctx.parameter, call.layer, product, weight.scatter, strands))
        if ctx.needs_input_grad[1]:
            gradients.weight_gradient(WeightGradient(ctx.bias, call.layer, bias_product))
        for use in ctx.uses:
            use.done()
        return None, None, None


class _Matmul(torch.autograd.Function):
    """Y = X Wᵀ of local blocks; its backward is dX = dY W, and leaves X and dY for the weight gradient.

    For a convolution read its products, with samples and pixels as rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor | None,
        token: Tensor,
        weight: Tensor,
        bias: nn.Parameter | None,
        call: _Call,
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x if shard is None else shard)
        ctx.token = token.detach()
        ctx.shape = x.shape
        return call.product.forward(x, weight.to(x.dtype), None if bias is None else local_of(bias).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        call: _Call = ctx.call
        (saved,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        token = None
        if ctx.needs_input_grad[2]:
            # The gather of X, if only its shard was kept, runs behind the next matmul.
            x = Pending(saved) if call.regather is None else call.regather.again(saved)
            call.operands = (x, gradient)
            token = ctx.token
        dx = None
        if ctx.needs_input_grad[0]:
            if call.version is not None:
                check_unchanged(call.weight.parameter, call.version, f"the weight of {call.layer}")
            whole = call.weight.backward(call.layer)
            dx = call.product.input_gradient(gradient, whole.to(gradient.dtype), ctx.shape)
            call.weight.read("backward", call.ways)
            call.kept = None
        return dx, None, token, None, None, None
