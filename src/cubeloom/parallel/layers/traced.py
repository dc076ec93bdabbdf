"""The layers of a traced model: features are cut between layers, rows are all those of a rank of data and z."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.operations import operation_of
from cubeloom.parallel import weave
from cubeloom.parallel.collective import Collective, Payload, Started
from cubeloom.parallel.gradients import WeightGradient
from cubeloom.parallel.layers.alike import all_parts_of, own_part_of
from cubeloom.parallel.layers.classes import Classes
from cubeloom.parallel.layers.declared import Making, make_layer
from cubeloom.parallel.layers.embedding import CubeEmbedding
from cubeloom.parallel.layers.linear import CubeLinear
from cubeloom.parallel.layers.logits import CutLogits
from cubeloom.parallel.layers.norm import CubeNorm
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.products import Product, add_to, product_of
from cubeloom.parallel.specs import TracedEmbeddingSpec, TracedLinearSpec, TracedNormSpec, WholeSpec
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight


@dataclass
class _Shared:
    source: weakref.ref[Tensor]
    whole: Tensor
    left: int


@dataclass
class SharedInput:
    """An input shared by several layers, in the layout of their matmuls. The first layer that is called prepares it.

    Each strand of a weave has its own.
    """

    layers: int = 0
    _kept: dict[int, _Shared] = field(default_factory=dict)  # by the strand's number

    def of(self, source: Tensor) -> Tensor | None:
        number = weave.place()[0]
        kept = self._kept.get(number)
        if kept is None or kept.source() is not source:
            return None
        kept.left -= 1
        if not kept.left:
            del self._kept[number]
        return kept.whole

    def keep(self, source: Tensor, whole: Tensor) -> None:
        if self.layers > 1:
            self._kept[weave.place()[0]] = _Shared(weakref.ref(source), whole, self.layers - 1)

    def __deepcopy__(self, memo: dict[int, object]) -> SharedInput:
        memo[id(self)] = made = SharedInput(self.layers)
        return made


class _Ready(Started):
    """An input that another layer has already prepared."""

    def __init__(self, collective: Collective, whole: Tensor) -> None:
        super().__init__(collective)
        self._whole = whole

    def finish(self) -> Tensor:
        return self._whole


class _Kept(Started):
    """An input that is kept for the layers that follow."""

    def __init__(self, started: Started, shared: SharedInput, source: Tensor) -> None:
        super().__init__(started.collective)
        self._started, self._shared, self._of = started, shared, source

    def finish(self) -> Tensor:
        whole = self._started.finish()
        self._shared.keep(self._of, whole)
        return whole


class TracedLinear(CubeLinear):
    """`[…, K]` whole, `[…, K/k]` or `[…, K/(k·n)]` -> `[…, N/(n·k)]`, `[…, N/n]` or `[…, N]` whole."""

    def __init__(
        self, spec: TracedLinearSpec, state: CubeState, weight: Weight, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__(spec, state, weight, bias, product)
        along_k, along_n = (state.network.axis(axis) for axis in (spec.k_axis, spec.n_axis))
        self._enters = along_k if spec.enters else None
        self._along_n = along_n
        self._given = spec.given
        self._features = spec.n
        self._dim = 1 if spec.rank is not None else -1
        self._shared: SharedInput = state.inputs.setdefault(spec.joins or spec.name, SharedInput())
        self._shared.layers += len(spec.calls) and 1
        arranged = spec.arrangement(state.config)
        self._classes = (
            Classes.even(spec.n // along_n.size, along_n) if arranged is None else Classes.of(arranged, along_n)
        )
        self._regather = False
        self._own_features = None  # a bias is cut like the features
        if spec.kept:
            sections = KeptSections(spec, state, self._output)
            self._output = sections
            self._own_features, self._adds_bias = sections.of_bias, False
        # If ranks use whole outputs differently, gradients are summed; otherwise all ranks have the same gradient.
        leaves = spec.leaves and spec.shared
        dims = {"rows": 0, "features": self._dim}
        self._leave = Collective.between(spec.leaving, state.network, f"{spec.name} leave", dims) if leaves else None
        if spec.given == "whole":
            self._own_classes = None  # parts are gathered with their padding, which is then cut off

    def _start(self, x: Tensor, source: Tensor, instead: Payload | None = None) -> Started:
        whole = self._shared.of(source)
        if whole is not None:
            return _Ready(self._input, whole)
        if self._enters is not None:
            x = own_part_of(x, self._enters, self._dim, f"{self._name} enter")
        return _Kept(self._input.start(x), self._shared, source)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self._given == "whole":
            shared, name = self._leave, f"{self._name} leave"
            y = all_parts_of(y, self._along_n, self._dim, name) if shared is None else shared(y)
            return y if y.shape[self._dim] == self._features else y.narrow(self._dim, 0, self._features)
        network = self._state.network
        if self._given == "lazy" and self._along_n.size * network.grid.data * network.grid.z > 1:
            return CutLogits.of(y, network, self._along_n, self._classes, self._name)
        return y


class KeptSections:
    """Sections of features: some are cut, and each rank has others whole, such as a key that all heads share."""

    def __init__(self, spec: TracedLinearSpec, state: CubeState, cut: Callable[[Tensor], Tensor]) -> None:
        network, dims = state.network, {"rows": 0, "features": -1}
        self._cut, self._kept, self._sizes = cut, spec.kept, spec.sections
        self._along_n, self._along_k = network.axis(spec.n_axis), network.axis(spec.k_axis)
        between = [Collective.between(each, network, f"{spec.name} kept", dims) for each in spec.kept_output()]
        self._sum, self._gather = between

    def __call__(self, partial: Tensor) -> Tensor:
        parts = partial.split([size // self._along_n.size for size in self._sizes], -1)
        cut = [part for number, part in enumerate(parts) if number not in self._kept]
        kept = [part for number, part in enumerate(parts) if number in self._kept]
        found = iter([self._gather(self._sum(part.contiguous())) for part in kept])
        own = iter([self._cut(part.contiguous()) for part in cut])
        return torch.cat([next(found) if number in self._kept else next(own) for number in range(len(parts))], -1)

    def of_bias(self, bias: Tensor) -> Tensor:
        """The part of the whole bias that this rank adds."""
        place, count = (
            self._along_n.index * self._along_k.size + self._along_k.index,
            self._along_n.size * self._along_k.size,
        )

        def own(number: int, section: Tensor) -> Tensor:
            part = len(section) // count
            return section if number in self._kept else section.narrow(0, place * part, part)

        return torch.cat([own(number, section) for number, section in enumerate(bias.split(list(self._sizes)))])


class TracedEmbedding(CubeEmbedding):
    def __init__(self, spec: TracedEmbeddingSpec, state: CubeState, weight: Weight) -> None:
        super().__init__(spec, state, weight, spec.padding)
        self._scale, self._leaves = spec.scale, state.network.axis("x") if spec.leaves else None

    def forward(self, tokens: Tensor) -> Tensor:
        rows = super().forward(tokens)
        if self._scale != 1:
            rows = rows * torch.tensor(self._scale, dtype=rows.dtype)
        return rows if self._leaves is None else all_parts_of(rows, self._leaves, -1, f"{self._name} leave")


@make_layer.register
def _(spec: TracedLinearSpec, making: Making) -> nn.Module:
    weight = making.weight(spec.shares or spec.name, bool(spec.over_z(making.state.config)))
    return TracedLinear(spec, making.state, weight, making.parameter("bias"), product_of(making.plain))


@make_layer.register
def _(spec: TracedEmbeddingSpec, making: Making) -> nn.Module:
    return TracedEmbedding(spec, making.state, making.weight(spec.shares or spec.name))


@make_layer.register
def _(spec: TracedNormSpec, making: Making) -> nn.Module:
    parameters = making.parameter("weight"), making.parameter("bias")
    return CubeNorm(spec, making.state, *parameters, spec.eps, spec.axes, spec.offset)


@make_layer.register
def _(spec: WholeSpec, making: Making) -> nn.Module:
    """The plain module. Code that reads one of its parameters gets what the rank uses; `parameters()` is distributed."""
    module, state = making.plain, making.state
    reads = _Reads(state, spec.name)
    for each in spec.own:
        parameter = making.parameter(each.name)
        assert parameter is not None
        torch_private.parameters_of(module)[each.name] = parameter
        if axes := spec.rest(each, state.config):
            reads.weights[each.name] = Weight(
                parameter,
                state.network.axis(*axes),
                state.rest.weights,
                state.prefetch_order,
                f"{spec.name}.{each.name}",
            )
    kind: Any = type(module)
    module.__class__ = _reading_class(kind, tuple(each.name for each in spec.own))
    object.__setattr__(module, _READS, reads)  # on the instance, not its class: a copy reads its own parameters
    return module


@cache
def _reading_class(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """One for all modules of a kind: the compiler tells equal blocks by the classes of what they have."""
    properties: dict[str, Any] = {name: property(_reader(name)) for name in names}
    return type(kind.__name__, (kind,), {**properties, "forward": _reading(kind)})


_READS = "_cubeloom_reads"


@dataclass
class _Reads:
    """How a module that is left whole reads its parameters: gathered once per forward, however often they are read."""

    state: CubeState
    layer: str
    weights: dict[str, Weight] = field(default_factory=dict)
    read: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # during a forward, by the strand's number

    def whole(self, module: nn.Module, name: str) -> Tensor:
        parameter = torch_private.parameters_of(module)[name]
        assert parameter is not None
        if name not in self.weights:
            return self.state.local(parameter)
        weight = self.weights[name]
        if self.state.counting is not None:  # of a forward whose targets alone are counted
            local = local_of(parameter)
            return local.new_zeros(()).expand(len(local) * weight.parts, *local.shape[1:])
        whole, ways = weight.forward(f"{self.layer}.{name}", backward_needs_it=False), weave.place()[1]
        weight.read("forward", ways)
        return _Gathered.apply(parameter, whole, weight, self.state, ways)


def _reader(name: str) -> Callable[[nn.Module], Tensor]:
    def read(module: nn.Module) -> Tensor:
        reads: _Reads = vars(module)[_READS]
        read = reads.read.get(weave.place()[0])
        if read is None:
            return Unread.of(torch_private.parameters_of(module)[name], lambda: reads.whole(module, name))
        if name not in read:
            read[name] = reads.whole(module, name)
        return read[name]

    return read


def _reading(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        read, number = vars(module)[_READS].read, weave.place()[0]
        outer = read.get(number)
        read[number] = {}
        try:
            return kind.forward(module, *arguments, **named)
        finally:
            if outer is None:
                del read[number]
            else:
                read[number] = outer

    return forward


class Unread(Tensor):
    """A parameter that code outside of its module reads: gathered when it is used, and not for its shape or dtype."""

    read: Callable[[], Tensor]

    @staticmethod
    def of(parameter: nn.Parameter | None, read: Callable[[], Tensor]) -> Unread:
        assert parameter is not None
        local = local_of(parameter)
        with torch_private.real_tensors():  # a rehearsal's tensors have their own class
            looks = torch.empty((), dtype=local.dtype, device=local.device).expand(parameter.shape)
            made: Unread = looks.as_subclass(Unread)
        made.read = read
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operation_of(function).metadata:
            args, kwargs = torch_private.tree_map(
                lambda each: each.read() if isinstance(each, Unread) else each, (args, kwargs)
            )
        with torch_private.without_subclasses():
            return function(*args, **(kwargs or {}))


class _Gathered(torch.autograd.Function):
    """A parameter that z cuts, all-gathered: its gradient is reduce-scattered."""

    @staticmethod
    def forward(
        ctx: Any, parameter: nn.Parameter, whole: Tensor, weight: Weight, state: CubeState, ways: int
    ) -> Tensor:
        ctx.parameter, ctx.weight, ctx.gradients, ctx.ways = parameter, weight, state.gradients, ways
        ctx.use = state.gradients.use(parameter)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        gradients, parameter = ctx.gradients, ctx.parameter

        def product(into: Tensor | None, dtype: torch.dtype) -> Tensor:
            return add_to(into, gradient.to(dtype, copy=True))

        gradients.weight_gradient(WeightGradient(parameter, "whole", product, ctx.weight.scatter, ctx.ways))
        ctx.use.done()
        return (None,) * 5
