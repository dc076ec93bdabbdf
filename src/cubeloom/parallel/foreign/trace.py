"""Run a model once and see which layer's output reaches which layer's input, feature by feature.

The model runs as it is, under a mode of torch's that sees every operation: nothing is asked of its source. Layers are opaque;
between them each tensor that comes from a layer belongs to a `Flow`. It runs in evaluation mode and, if it is to be trained,
once more in training mode, where it may take other branches: what either needs whole is whole.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from cubeloom.base.torch_private import tree_leaves, tree_map
from cubeloom.parallel.foreign.flow import Flow
from cubeloom.parallel.foreign.known import Sizes
from cubeloom.parallel.foreign.loss import COUNTING
from cubeloom.parallel.foreign.operations import is_harmless, name_of, why_not

# Keyword arguments of one forward, or what to do with the module instead.
Example = Mapping[str, Any] | Callable[[nn.Module], object]


@dataclass(frozen=True)
class Call:
    """One use of a layer: rows (tokens, or pixels of samples), and whether its input's gradient is wanted."""

    rows_in: int
    rows_out: int
    gradient: bool


@dataclass
class Seen:
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    flows: list[Flow] = field(default_factory=list)
    given_whole: set[str] = field(default_factory=set)  # layers that took what is no layer's
    strange: dict[str, str] = field(default_factory=dict)  # layers that cannot be cut, and why
    used: set[int] = field(default_factory=set)  # ids of parameters
    losses: int = 0  # whose targets ranks count together


def trace(module: nn.Module, layers: Mapping[str, Sizes], example: Example) -> Seen:
    """What happens between these layers. The module is left as it was, and so are torch's random numbers."""
    watch = _Watch(module, layers)
    with _evaluating(module):
        _watched(watch, module, example)
    if any(each.training for each in module.modules()):
        watch.again = True
        with _same_buffers(module):
            _watched(watch, module, example)
    return watch.seen


def _watched(watch: _Watch, module: nn.Module, example: Example) -> None:
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        # A graph shows whose gradient is wanted; it need not hold tensors, or they would seem to be in use.
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda _: None, _never))
        stack.enter_context(watch.hooked())
        with watch:
            result = _run(module, example)
    watch.finish()
    del result  # alive until here: what it holds is returned to the caller


def _run(module: nn.Module, example: Example) -> object:
    if callable(example):
        return example(module)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    here = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, dict(example))
    return module(**here)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """No dropout, no running statistics."""
    before = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, training in before.items():
            each.training = training


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """Running statistics are left as they are."""
    before = {buffer: buffer.clone() for buffer in module.buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before.items():
                buffer.copy_(values)


def _never(_: object) -> Tensor:
    raise RuntimeError("a model that is being looked at went through a backward")


class _Watch(TorchFunctionMode):
    def __init__(self, module: nn.Module, layers: Mapping[str, Sizes]) -> None:
        super().__init__()
        self.seen = Seen()
        self.again = False  # calls have been counted
        self._layers = {module.get_submodule(name): (name, sizes) for name, sizes in layers.items()}
        self._owners = {id(own): name for layer, (name, _) in self._layers.items() for own in layer.parameters()}
        self._flows: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors
        self._inside = 0  # layers
        self._module, self._forwards = module, 0  # of the module itself, that are running

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [
            self._module.register_forward_pre_hook(lambda *_: self._begin(1)),
            self._module.register_forward_hook(lambda *_: self._begin(-1)),
        ]
        for layer in self._layers:
            handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, forwards: int) -> None:
        self._forwards += forwards

    def finish(self) -> None:
        """Tensors that are still there are held by somebody."""
        gc.collect()
        for flow in self._flows.values():
            flow.stop("its output is returned or kept")
        self.seen.flows = [flow for flow in self.seen.flows if flow.root is flow]

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = name_of(function)
        if self._forwards and name in COUNTING and result.dim() == 0 and not self.again:
            self.seen.losses += 1
        if not is_harmless(name):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._note_parameters(tensors)
            if not self._inside:
                self._follow(name, args, kwargs, tensors, result)
        return result

    def _note_parameters(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                self.seen.used.add(id(tensor))
                if not self._inside and id(tensor) in self._owners:
                    self.seen.strange[self._owners[id(tensor)]] = "its parameters are used outside of it"

    def _follow(self, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], result: Any) -> None:
        flowing = [tensor for tensor in tensors if tensor in self._flows]
        if not flowing:
            return
        flows: list[Flow] = [self._flows[tensor].root for tensor in flowing]
        others = [tensor for tensor in tensors if tensor not in self._flows]
        why = why_not(name, args, kwargs, flowing, others, flows[0].dim)
        if why is None and (len({flow.dim for flow in flows}) > 1 or not isinstance(result, Tensor)):
            why = f"its output goes into {name}"
        for flow in flows:
            if why is not None:
                flow.stop(why)
            else:
                flows[0].merge(flow)
        if why is None:
            self._flows[result] = flows[0].root

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside += 1
        name, sizes = self._layers[layer]
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            self.seen.strange[name] = "it is called with more than its input"
            return
        dims = args[0].dim()
        if dims != sizes.rank if sizes.rank is not None else dims < 2:
            self.seen.strange[name] = f"its input has {dims} dimensions"
        flow = self._flows.get(args[0])
        if flow is None:
            self.seen.given_whole.add(name)
        elif flow.root.dim != sizes.dim:
            flow.stop(f"{name} takes its features for something else")
            self.seen.given_whole.add(name)
        else:
            flow.root.takers.add(name)

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name, sizes = self._layers[layer]
        if name not in self.seen.strange:
            x: Tensor = args[0]
            call = Call(x.numel() // sizes.k, output.numel() // sizes.n, x.requires_grad)
            if not self.again:
                self.seen.calls[name].append(call)
            flow = Flow({name}, sizes.dim)
            self.seen.flows.append(flow)
            self._flows[output] = flow
        self._inside -= 1
