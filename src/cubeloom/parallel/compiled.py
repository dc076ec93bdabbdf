"""Compiles local computation with torch: norms, activations, biases and residual sums in few kernels.

On a cube of one device a block has no collectives. It is compiled as a whole, as in the plain model, except for its
weight gradients (`parallel.deferred_wgrad`). On other grids the code between collectives is compiled: modules that the
cut does not name, and the losses of a head. For traced models see `parallel.traced.compiling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cubeloom.base import torch_private
from cubeloom.base.grid import Grid
from cubeloom.parallel.deferred_wgrad import DeferredWgradBlock, Token, within
from cubeloom.parallel.feed_forward import fused_class
from cubeloom.parallel.fp8 import SCALES, LayerFP8
from cubeloom.parallel.gradients import WeightGradient
from cubeloom.parallel.layers.head import CubeHead
from cubeloom.parallel.layers.linear import CubeLinear
from cubeloom.parallel.layers.loss import CubeCrossEntropy
from cubeloom.parallel.parameter import check_unchanged, local_of, version_of
from cubeloom.parallel.products import Matmul
from cubeloom.parallel.specs import AttentionSpec, DropoutSpec, FeedForwardSpec, LayerSpec, LinearSpec, NormSpec
from cubeloom.parallel.state import CubeState

BACKEND = "inductor"


def whole_blocks(model: nn.Module, specs: Sequence[LayerSpec], grid: Grid) -> dict[str, nn.Module]:
    """Plain copies, by name, of the blocks that can be compiled as a whole; taken before layers are replaced.

    Blocks are the members of a list of modules, and norms outside of one. Every layer in a block must be the plain
    layer on a cube of one device.
    """
    if grid.x * grid.y * grid.z > 1:
        return {}
    by_name = {spec.name: spec for spec in specs}
    found: dict[str, nn.Module] = {}
    for name, block in _blocks(model):
        names = (f"{name}.{inner}".rstrip(".") for inner, _ in block.named_modules())
        inside = [by_name[each] for each in names if each in by_name]
        if inside and all(map(_is_plain, inside)):
            found[name] = copied = deepcopy(block)
            for spec in inside:
                if isinstance(spec, FeedForwardSpec):
                    _fuse(copied.get_submodule(spec.name.removeprefix(name).removeprefix(".")), spec)
    return found


def _fuse(module: nn.Module, spec: FeedForwardSpec) -> None:
    kind: Any = type(module)
    module.__class__ = fused_class(kind, spec.layers, spec.then)


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    within: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            within += (f"{name}.",)
            yield from ((f"{name}.{number}", block) for number, block in module.named_children())
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and not name.startswith(within):
            yield name, module


def _is_plain(spec: LayerSpec) -> bool:
    if isinstance(spec, LinearSpec):
        return spec.shares is None
    return isinstance(spec, NormSpec | FeedForwardSpec | AttentionSpec) or (
        isinstance(spec, DropoutSpec) and spec.probability == 0
    )


def compile_local(model: nn.Module, plain: Mapping[str, nn.Module], state: CubeState) -> None:
    """Compile the blocks that have a plain copy, and the local computation in the rest of a parallelized model."""
    for name, block in plain.items():
        own = model.get_submodule(name)
        fp8 = {inner: each.fp8 for inner, each in own.named_modules() if isinstance(each, CubeLinear)}
        rounded = {inner: each for inner, each in fp8.items() if each is not None}
        own.forward = _Block(block, dict(own.named_parameters()), state, own.forward, rounded)
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{block}.") for block in plain):
            continue
        if isinstance(module, CubeHead | CubeCrossEntropy):
            module.compile_local(BACKEND)
        elif _is_unnamed_leaf(module):
            module.forward = torch.compile(module.forward, backend=BACKEND, dynamic=False)


def _is_unnamed_leaf(module: nn.Module) -> bool:
    """A layer that the cut does not name, except torch's own layers, which are one kernel already."""
    ours = type(module).__module__.startswith(("torch.nn", __name__.rpartition(".")[0]))
    return not ours and next(module.children(), None) is None and type(module).forward is not nn.Module.forward


# By FP8 layer: from the "gradients" of the tokens of a call to how its weight gradient is computed.
Products = Mapping[str, Callable[..., Callable[..., Tensor]]]


class _Block:
    """Calls a compiled plain block with this rank's parameters in place of its own."""

    def __init__(
        self,
        plain: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        state: CubeState,
        otherwise: Callable[..., Any],
        fp8: Mapping[str, LayerFP8],
    ) -> None:
        self._plain = plain
        self._parameters = parameters
        self._state = state
        self._otherwise = otherwise  # the block's own forward
        self._fp8 = fp8
        self._calls: dict[object, _Call | None] = {}  # by kind; None: not compiled
        # Calls of one kind have one shape. Else the compiler would take a size that differs between kinds of blocks for one
        # that changes, and its kernels would divide by it for every element.
        self._run = torch.compile(_run, backend=BACKEND, dynamic=False)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        rounds = {name: each for name, each in self._fp8.items() if each.ready}
        kind = _kind((arguments, named)), bool(rounds)
        if kind not in self._calls:
            values = {name: local_of(parameter) for name, parameter in self._parameters.items()}
            kinds = {name: each.in_compiled for name, each in rounds.items()}
            tapped = DeferredWgradBlock.of(self._plain, values, arguments, named, kinds)
            # A linear that a call passes twice is not deferred, and so would not be rounded.
            all_deferred = self._fp8.keys() <= tapped.tokens.keys()
            self._calls[kind] = _Call.of(tapped, self._parameters, self._state, rounds) if all_deferred else None
        call = self._calls[kind]
        if call is None:
            return self._otherwise(*arguments, **named)
        return self._run(call.tapped.block, call.names, call.values(self._products()), arguments, named)

    def _products(self) -> Products:
        first = torch.is_grad_enabled() and not torch_private.in_backward()
        uses = {name: each.compiled_use(first) for name, each in self._fp8.items()}
        return {name: use for name, use in uses.items() if use is not None}


def _kind(given: Any) -> Any:
    """What calls must have in common to pass through the same layers with the same shapes."""
    if isinstance(given, Tensor):
        return given.shape, given.dtype
    if isinstance(given, dict):
        return tuple((name, _kind(each)) for name, each in given.items())
    return tuple(map(_kind, given)) if isinstance(given, list | tuple) else given


def _run(
    block: nn.Module,
    names: tuple[str, ...],
    values: tuple[Tensor, ...],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    return functional_call(block, dict(zip(names, values, strict=True)), arguments, named)


@dataclass(frozen=True)
class _Call:
    """The arguments of a compiled block in place of its parameters: their values, and tokens of deferred weights."""

    tapped: DeferredWgradBlock
    weights: Mapping[str, nn.Parameter]  # deferred, by layer
    others: Mapping[str, nn.Parameter]  # by name
    names: tuple[str, ...]  # of the arguments
    state: CubeState
    rounds: Mapping[str, LayerFP8]  # by layer

    @classmethod
    def of(
        cls,
        tapped: DeferredWgradBlock,
        parameters: Mapping[str, nn.Parameter],
        state: CubeState,
        rounds: Mapping[str, LayerFP8],
    ) -> _Call:
        layers = tapped.tokens
        names = [within(layer, "weight") for layer in layers]
        weights = {layer: parameters[name] for layer, name in zip(layers, names, strict=True)}
        others = {name: parameter for name, parameter in parameters.items() if name not in names}
        tokens = (within(layer, token) for layer in layers for token in layers[layer])
        scales = (within(layer, each) for layer in rounds for each in SCALES)
        return cls(tapped, weights, others, (*scales, *names, *others, *tokens), state, rounds)

    def values(self, products: Products) -> tuple[Tensor, ...]:
        """The values in the order of the names."""
        weights = map(self.value, self.weights.values())
        scales = (getattr(each, name) for each in self.rounds.values() for name in SCALES)
        return *scales, *weights, *_Wanted.apply(self, products, *self.others.values(), *self.weights.values())

    def value(self, parameter: nn.Parameter) -> Tensor:
        local = local_of(parameter)
        return local.clone() if self.state.updates_under_way else local

    def token(self, layer: str, token: Token) -> Tensor:
        """Tokens are never read: they are existing memory, expanded."""
        memory = local_of(self.weights[layer])
        return (memory if token.dtype is None else memory.view(token.dtype)).as_strided(
            token.shape, (0,) * len(token.shape)
        )


class _Wanted(torch.autograd.Function):
    """Values and tokens that need gradients, inside autograd; the backward gives all parameters' gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, products: Products, *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.call, ctx.products = call, products
        gradients = call.state.gradients
        ctx.uses = [gradients.use(each) for each in parameters]
        ctx.versions = [] if call.state.updates_under_way else [version_of(each) for each in parameters]
        tokens = (call.token(layer, each) for layer, some in call.tapped.tokens.items() for each in some.values())
        return *map(call.value, call.others.values()), *tokens

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[None, ...]:
        call: _Call = ctx.call
        gradients = call.state.gradients
        parameters = *call.others.values(), *call.weights.values()
        for parameter, version in zip(parameters, ctx.versions, strict=False):
            check_unchanged(parameter, version, f"a parameter of shape {list(parameter.shape)}")
        operands = iter(found[len(call.others) :])
        for parameter, gradient in zip(call.others.values(), found, strict=False):
            gradients.add(parameter, gradient)
        for layer, weight in call.weights.items():
            own = [next(operands) for _ in call.tapped.tokens[layer]]
            product = ctx.products.get(layer, _product)(*own)
            gradients.weight_gradient(WeightGradient(weight, layer, product))
        for use in ctx.uses:
            use.done()
        return (None,) * (2 + len(call.others) + len(call.weights))


def _product(x: Tensor, gradient: Tensor) -> Callable[..., Tensor]:
    return partial(Matmul().weight_gradient, gradient, x, torch.Size())
