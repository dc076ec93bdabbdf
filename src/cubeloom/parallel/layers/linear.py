"""The linear layer: one matmul on the cube, for every setting of the grid. A convolution is a linear over pixels.

Shapes of `Y[M,N] = X[M,K] · W[K,N]` on one rank, for an expand (k is x and n is y; a contract exchanges them):

    X stored   [M/(z·y), K/x]   rows sharded, or [M/z, K/x] replicated over y, or [M/z, K/(x·y)] features sharded
    X          [M/z, K/x]       all-gathered along n
    W stored   [N/(y·z), K/x]   all-gathered along z: [N/y, K/x]
    Y partial  [M/z, N/y]       a partial sum over k
    Y stored   [M/(z·x), N/y]   reduce-scattered by rows, or [M/z, N/y] all-reduced, or [M/z, N/(y·x)] by features
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.comm import Pending
from cubeloom.parallel import weave
from cubeloom.parallel.collective import Collective, Payload, Started
from cubeloom.parallel.cut import CutError
from cubeloom.parallel.fp8 import FP8Matmul, LayerFP8
from cubeloom.parallel.gradients import Gradients, WeightGradient
from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.layers.turn import Turn
from cubeloom.parallel.parameter import Version, check_unchanged, local_of, own_part, version_of
from cubeloom.parallel.products import Convolution, Convolve, Product, add_to, product_of, sizes
from cubeloom.parallel.specs import LinearSpec, Side
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight


@dataclass(frozen=True)
class Expand(Declared):
    """A linear or convolution from features on x to features on y: a column-parallel linear with the input cut as well.

    `heads`: the output is attention's input and consists of this many equal groups of features, which must stay whole.
    The reduce-scatter over x cuts it by heads, so that each rank has whole sequences of heads/(x·y) heads and attention
    is computed once. `sharded_input`, `sharded_output`: rows are cut on that side even if activations are replicated.
    `turn`: redistribute the output, so that features are on x again (for an odd number of linears in a row). `stream`:
    the axis of the residual stream. If it is y, as after an odd number of convolutions, an expand leads back to it, and
    its heads are those of its input. `sections`: the sizes of concatenated outputs, such as gate and up of a gated MLP.
    Each rank has an equal part of every section, in order. With `heads` each section has this many heads. `queries`:
    number of queries per key-value head. The sections are then all queries, all keys and all values, and need not be
    given. If the axis that cuts heads has more ranks than there are heads, the queries of a head are divided, and each
    rank has a copy of the key and the value.
    """

    heads: int | None = None
    sharded_input: bool = False
    sharded_output: bool = False
    turn: bool = False
    stream: Side = "x"
    queries: int | None = None
    sections: tuple[int, ...] = ()

    def spec(self, name: str, module: nn.Module, seen: Seen) -> LinearSpec | None:
        return _spec(name, module, seen, "x", self, self.sharded_input, self.sharded_output)


@dataclass(frozen=True)
class Contract(Declared):
    """A linear or convolution from features on y to features on x: a row-parallel linear with the output cut as well.

    `sections`, `heads` and `queries` as in Expand, but of its input. If the `stream` is on y, the contract comes first
    and an expand second; its heads are then those of its output. `turn`: redistribute the output, so that features are
    on y again.
    """

    heads: int | None = None
    turn: bool = False
    stream: Side = "x"
    queries: int | None = None
    sections: tuple[int, ...] = ()

    def spec(self, name: str, module: nn.Module, seen: Seen) -> LinearSpec | None:
        return _spec(name, module, seen, "y", self, False, False)


def _spec(
    name: str, module: nn.Module, seen: Seen, side: Side, kind: Expand | Contract, always_in: bool, always_out: bool
) -> LinearSpec | None:
    if not isinstance(module, nn.Linear | Convolution):
        return None
    if kind.heads is not None and not isinstance(module, nn.Linear):
        raise CutError(f"layer {name} is a convolution, whose features cannot be cut by heads; use a linear on pixels")
    k, n, kernel_numel = sizes(name, module)
    # Heads are on the side opposite the stream: they are the output's if features come from the stream.
    heads_in, heads_out = (kind.heads is not None and (side == kind.stream) is out for out in (False, True))
    sections = tuple(kind.sections)
    if kind.heads is not None and kind.queries is not None:
        features, parts = (n, kind.queries + 2) if heads_out else (k, kind.queries)
        if features % (kind.heads * parts):
            keys = (
                "heads={} keys, as many values and queries={} for each"
                if heads_out
                else "heads={} with queries={} each"
            )
            raise CutError(f"layer {name}: {features} features are not {keys.format(kind.heads, kind.queries)}")
        if heads_out:
            sections = sections or (n // parts * kind.queries, n // parts, n // parts)
    if sections:
        _check_sections(name, n, kind, sections, heads_out)
    return LinearSpec(
        name=name,
        k=k,
        n=n,
        side=side,
        bias=module.bias is not None,
        kernel_numel=kernel_numel,
        pixels=seen.pixels,
        transposed=bool(getattr(module, "transposed", False)),
        turn=kind.turn,
        shares=seen.shares,
        heads=kind.heads,
        queries=kind.queries,
        sections=sections,
        head_axis="y" if kind.stream == "x" else "x",
        always_in=always_in or heads_in,
        always_out=always_out or heads_out or kind.turn,
    )


def _check_sections(name: str, n: int, kind: Expand | Contract, sections: tuple[int, ...], of_heads: bool) -> None:
    if sum(sections) != n or min(sections) < 1:
        raise CutError(f"layer {name}: sections={sections} are {sum(sections)} output features, and it has {n}")
    if kind.turn:
        raise CutError(f"layer {name}: sections={sections} are on its outputs, which turn=True would redistribute")
    if not of_heads or kind.heads is None:
        return
    if kind.queries is None:
        if any(size % kind.heads for size in sections):
            raise CutError(f"layer {name}: sections={sections} are not heads={kind.heads} equal heads each")
    elif (unit := n // (kind.queries + 2)) and sections != (legal := (n - 2 * unit, unit, unit)):
        raise CutError(
            f"layer {name}: with heads={kind.heads} and queries={kind.queries} its {n} output features are all queries, all "
            f"keys and all values, sections={legal}, and not {sections}"
        )


class CubeLinear(nn.Module):
    """A linear, or a convolution: `product` is the operation on local blocks."""

    def __init__(
        self, spec: LinearSpec, state: CubeState, weight: Weight, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__()
        self._product = product
        self.weight = weight.parameter
        self.bias = bias
        self._state = state
        self._gathered = weight
        along_n = state.network.axis(spec.n_axis)
        along_k = state.network.axis(spec.k_axis)
        inputs, outputs = spec.spread_in(state.config), spec.spread_out(state.config)
        # The layer's own matmuls produce what is reduced: Y in the forward, dX in the backward.
        of, name = state.network, spec.name
        dims = {"rows": 0, "features": 1 if isinstance(product, Convolve) else -1}
        self._input = Collective.between(spec.input(inputs), of, f"{name} input", dims, inplace=True)
        self._output: Callable[..., Tensor] = Collective.between(
            spec.output(outputs), of, f"{name} output", dims, inplace=True
        )
        self._regather = state.rest.inputs == "regathered" and inputs != "replicated" and along_n.size > 1
        self._own_features = own_part(along_k) if outputs == "features" else None
        # Rows are gathered before one matmul and scattered after another: a strand that waits between them yields here.
        between = inputs == "rows" and along_n.size > 1 and along_k.size == 1
        # If nothing in the plane is awaited, strands would run one after another and hold all gathered weights
        # meanwhile.
        alone = weight.sharded and along_n.size == along_k.size == 1
        self._lone_matmul = between or alone
        self.fp8: LayerFP8 | None = None
        if state.amax is not None and isinstance(spec, LinearSpec) and spec.takes_fp8:
            self.fp8 = weight.rounding = LayerFP8(state.amax, name, weight)
        # If only a bias is added to the product, the matmul adds it.
        self._adds_bias = bias is not None and along_k.size == 1 and not spec.turn and self.fp8 is None
        self._name = name
        self._turn = Turn(name, of, spec.k_axis) if spec.turn else None
        self._own_classes = spec.own_classes(state.config, along_n.index)

    def _start(self, x: Tensor, source: Tensor, instead: Payload | None = None) -> Started:
        """Start to prepare the input for the matmul. `source` is the tensor that the layer was called with."""
        return self._input.start(x, instead)

    def _use(self, x: Tensor) -> Product:
        """The local operation of this use of the layer."""
        if self.fp8 is None:
            return self._product
        first = torch.is_grad_enabled() and not torch_private.in_backward()
        return self.fp8.use(first, x.dtype) or self._product

    def _save_kept(self, x: Tensor, source: Tensor, product: Product) -> None:
        """In a recomputed forward whose result was kept: save what the backward needs."""
        instead = _rounded_input(product)
        if self._regather:
            _Saved.apply(x, x.detach() if instead is None else instead.outgoing(x), x)
            return
        whole = self._start(x, source, instead).finish()
        _Saved.apply(whole, None if instead is None else instead.of(x), x)

    def forward(self, x: Tensor) -> Tensor:
        kind, source = x.device.type, x
        result = weave.kept(self._name)
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # before it is communicated
        product = self._use(x)
        if result is not None:
            self._save_kept(x, source, product)
            return result
        instead = _rounded_input(product)
        started = self._start(x, source, instead)
        # Created between the two nodes of the input's collective: in the backward the weight gradient is then computed
        # while the input gradient is communicated.
        regather = self._input if self._regather else None
        call = _Call(self._name, product, self._gathered, self._state.gradients, regather, weave.place()[1])
        if not self._state.updates_under_way:
            call.version = version_of(self.weight)
        behind = self._state.hides_weight_gradients
        bias = self.bias if self._adds_bias else None
        token = _WeightGradient.apply(self.weight, bias, call) if behind else None
        # The input of a model's first layer may not need a gradient. Without a graph this is unknown.
        needed = x.requires_grad if torch.is_grad_enabled() else None
        weight = self._gathered.forward(self._name, backward_needs_it=needed)
        if needed and self._gathered.keeps:
            call.kept = weight
        whole = started.finish()
        if token is None:
            token = _WeightGradient.apply(self.weight, bias, call)
        shard = None
        if self._regather:
            shard = x.detach() if instead is None else instead.own
        values = None if instead is None else instead.of(x)
        saved = values if shard is None else shard
        if weave.replaying():
            whole, saved = _Saved.apply(whole, saved, token), None  # where nothing more is needed, it ends here
        partial = _Matmul.apply(whole, values, saved, token, weight, bias, call)
        self._gathered.read("forward", call.ways)
        if self._lone_matmul:
            weave.pause()
        y = self._output(partial) if call.gradient is None else self._output(partial, call.gradient)
        if self._turn is not None:
            y = self._turn(y)
        if self.bias is not None and not self._adds_bias:
            added = self._state.local(self.bias).to(y.dtype)
            y = y + self._product.bias(added if self._own_features is None else self._own_features(added))
        y = y if self._own_classes is None else y.narrow(-1, 0, self._own_classes)
        weave.keep(self._name, y)
        return y


@make_layer.register
def _(spec: LinearSpec, making: Making) -> nn.Module:
    from cubeloom.parallel.layers.head import CubeHead

    make = CubeHead if spec.fits_loss(making.state.config) else CubeLinear
    weight = making.weight(spec.shares or spec.name)
    return make(spec, making.state, weight, making.parameter("bias"), product_of(making.plain))


def _rounded_input(product: Product) -> Payload | None:
    return product.input if isinstance(product, FP8Matmul) else None


@dataclass
class _Call:
    """One use of the layer: what its nodes pass to each other in the backward."""

    layer: str
    product: Product
    weight: Weight
    gradients: Gradients
    regather: Collective | None
    ways: int  # strands that use the layer
    operands: tuple[Pending, Tensor] | None = None  # X and dY of the weight gradient
    version: Version | None = None  # of the weight in the forward, if it must not change until the backward
    kept: Tensor | None = None  # the gathered weight, if it is kept until the backward

    @property
    def gradient(self) -> Payload | None:
        """What is used instead of the output's gradient, if it is rounded."""
        return self.product.output_gradient if isinstance(self.product, FP8Matmul) else None


class _WeightGradient(torch.autograd.Function):
    """Backward: computes dW = dYᵀ X from the operands that the matmul's node left, or defers it; and the bias gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, bias: nn.Parameter | None, call: _Call) -> Tensor:
        ctx.parameter, ctx.bias, ctx.call = parameter, bias, call
        ctx.uses = [call.gradients.use(each) for each in (parameter, bias) if each is not None]
        # The token only connects the graph: the local weight, which has its gradient's shape and exists already.
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

        def product(into: Tensor | None, dtype: torch.dtype) -> Tensor:
            return call.product.weight_gradient(gradient, x.wait(), ctx.shape, into, dtype)

        def bias_product(into: Tensor | None, dtype: torch.dtype) -> Tensor:
            return add_to(into, call.product.bias_gradient(gradient, dtype))

        strands = call.ways if weight.sharded else 1
        if ctx.needs_input_grad[0]:
            gradients.weight_gradient(WeightGradient(ctx.parameter, call.layer, product, weight.scatter, strands))
        if ctx.needs_input_grad[1]:
            gradients.weight_gradient(WeightGradient(ctx.bias, call.layer, bias_product))
        for use in ctx.uses:
            use.done()
        return None, None, None


class _Saved(torch.autograd.Function):
    """In a forward that is computed once more: what the product's node saved in the first one, before the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor | None, token: Tensor) -> Tensor:
        ctx.save_for_backward(x if saved is None else saved)
        return x.view_as(x)


class _Matmul(torch.autograd.Function):
    """Y = X Wᵀ of local blocks. Its backward computes dX = dY W, and leaves X and dY for the weight gradient.

    For a convolution read its products, with samples and pixels as rows. `values`: X as it is multiplied, if it is
    rounded. `saved`: what the backward needs, if not X.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor | None,
        saved: Tensor | None,
        token: Tensor,
        weight: Tensor,
        bias: nn.Parameter | None,
        call: _Call,
    ) -> Tensor:
        ctx.call = call
        if not weave.replaying():
            ctx.save_for_backward(x if saved is None else saved)
        ctx.token = token.detach()
        ctx.shape = x.shape
        if values is not None:
            return call.product.forward(values, weight)
        return call.product.forward(x, weight.to(x.dtype), None if bias is None else local_of(bias).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None, None, None]:
        call: _Call = ctx.call
        (saved,) = ctx.saved_tensors
        dtype = gradient.dtype
        gradient = gradient.contiguous() if call.gradient is None else call.gradient.of(gradient)
        token = None
        if ctx.needs_input_grad[3]:
            # If only the shard of X was kept, its all-gather overlaps the next matmul.
            x = Pending(saved) if call.regather is None else call.regather.again(saved)
            call.operands = (x, gradient)
            token = ctx.token
        dx = None
        if ctx.needs_input_grad[0]:
            if call.version is not None:
                check_unchanged(call.weight.parameter, call.version, f"the weight of {call.layer}")
            whole = call.weight.backward(call.layer)
            whole = whole.to(dtype) if call.gradient is None else whole
            dx = call.product.input_gradient(gradient, whole, ctx.shape)
            call.weight.read("backward", call.ways)
            call.kept = None
        return dx, None, None, token, None, None, None
