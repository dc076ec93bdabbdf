"""Replaces the layers of a plain model by sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from cubeloom.base import counter, torch_private
from cubeloom.base.initial import Initial
from cubeloom.comm import Network
from cubeloom.parallel.arranged import Arranged, block_values
from cubeloom.parallel.boundary import Boundary, at_boundary
from cubeloom.parallel.buckets import Reduction
from cubeloom.parallel.check import Example
from cubeloom.parallel.compiled import compile_local, whole_blocks
from cubeloom.parallel.config import Batch, ShardingPolicy
from cubeloom.parallel.fp8 import amax_history
from cubeloom.parallel.layers.declared import AnyCut, FoundCut, Making, make_layer
from cubeloom.parallel.parameter import Block, distribute
from cubeloom.parallel.resolution import looked_at
from cubeloom.parallel.specs import FeedForwardSpec, LayerSpec, Parameter, TracedLossSpec, parameters
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight

# Returns the values of a rank's block of a parameter, given its name and block.
Fill = Callable[[str, Block], Tensor]


class Initialised(Protocol):
    """A model that says how its parameters are initialised."""

    def initial(self, name: str) -> Initial: ...


def initial_values(model: Initialised, seed: int, dtype: torch.dtype, device: torch.device | None = None) -> Fill:
    """Values that depend only on seed, name and index: any two grids start from the same model, bit for bit."""

    def fill(name: str, block: Block) -> Tensor:
        return block.draw(model.initial(name), counter.key(seed, name), dtype, device or torch.device("cpu"))

    return fill


def materialise(model: nn.Module, fill: Fill, modules: Iterable[str] = ("",)) -> nn.Module:
    """The serial model: create whole parameters for a model on the meta device, or for some of its modules, by name."""
    names: dict[int, str] = {}  # the first name of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    made: dict[int, nn.Parameter] = {}
    for module in (model.get_submodule(name) for name in modules):
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if id(parameter) not in made:
                shape = tuple(parameter.shape)
                value = fill(names[id(parameter)], Block(shape, (0,) * len(shape), shape))
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, made[id(parameter)])
        for name, buffer in list(module.named_buffers()):
            owner, _, attribute = name.rpartition(".")
            holder = module.get_submodule(owner)
            if buffer.is_meta and not isinstance(holder, torch_private.AnyBatchNorm):
                shape = tuple(buffer.shape)
                torch_private.buffers_of(holder)[attribute] = fill(name, Block(shape, (0,) * len(shape), shape))
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and norm.running_mean is not None:
                _start_running(norm, next(iter(made.values())))
    return model


def _start_running(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, like: Tensor) -> None:
    """Initialise running statistics as torch does."""
    for name in ("running_mean", "running_var"):
        setattr(norm, name, torch.empty(norm.num_features, dtype=like.dtype, device=like.device))
    norm.num_batches_tracked = torch.zeros((), dtype=torch.long, device=like.device)
    norm.reset_running_stats()


def apply(
    model: nn.Module,
    cut: AnyCut,
    network: Network,
    batch: Batch,
    fill: Fill,
    rest: ShardingPolicy | None = None,
    compile: bool = False,
    example: Example | None = None,
    unchecked: bool = False,
) -> CubeState:
    """Shard a model on the meta device over the cube, in place. Returns what its layers share: clock and gradients.

    `compile`: torch compiles the code between collectives. Raises CutError, before anything is allocated, if the model
    cannot be cut on this grid, or would compute something else than the serial model. For this, `example` and
    `unchecked` see `resolve`.
    """
    rest = rest or ShardingPolicy()
    specs, outputs = looked_at(model, cut, network.grid, rest, batch, example, unchecked)
    state = apply_specs(model, cut, specs, network, batch, fill, rest, compile)
    at_boundary(model, Boundary(network, outputs, raw=True))
    return state


def apply_specs(
    model: nn.Module,
    cut: AnyCut,
    specs: Sequence[LayerSpec],
    network: Network,
    batch: Batch,
    fill: Fill,
    rest: ShardingPolicy,
    compile: bool = False,
) -> CubeState:
    """Replace the model's modules by the layers of these specs, which are resolved."""
    state = CubeState.of(network, rest)
    state.amax = amax_history(specs, network, rest, state.gradients)
    found = isinstance(cut, FoundCut)
    plain = whole_blocks(model, specs, network.grid) if compile and not found else {}
    replace_layers(model, specs, state, fill)
    if isinstance(cut, FoundCut):
        cut.finish(model, network.grid, batch, state, fill, compile)
    network.models.add(model)
    if compile and not found:
        compile_local(model, plain, state)
    return state


# The workers of the pipe axis that hold a parameter of this name.
Holders = Callable[[str], tuple[int, ...]]


def replace_layers(
    model: nn.Module,
    specs: Iterable[LayerSpec],
    state: CubeState,
    fill: Fill,
    known: dict[str, nn.Parameter] | None = None,
    holders: Holders | None = None,
) -> None:
    """Replace modules by the layers of these specs: frozen and in evaluation mode where the plain ones are.

    `known`: the parameters that this rank holds already, by name. New ones are added: each name is one parameter.
    """
    maker = _Maker(dict(model.named_modules()), state, fill, {} if known is None else known, holders)
    places: dict[int, list[str]] = {}  # the names of each module
    for name, each in model.named_modules(remove_duplicate=False):
        places.setdefault(id(each), []).append(name)
    for spec in specs:
        if isinstance(spec, FeedForwardSpec | TracedLossSpec):
            continue  # its layers are replaced one by one; a loss between layers is not a module
        plain = model.get_submodule(spec.name)
        made = maker.make(spec)
        if made is plain:
            continue
        made.train(plain.training)
        torch_private.carry_forward_hooks(plain, made)
        # The surrounding model may read `in_features` and similar attributes.
        for attribute, value in vars(plain).items():
            if not attribute.startswith("_") and not hasattr(made, attribute):
                setattr(made, attribute, value)
        for place in places[id(plain)]:
            owner, _, attribute = place.rpartition(".")
            setattr(model.get_submodule(owner), attribute, made)
    for module in model.modules():
        own = torch_private.parameters_of(module)
        own.update({kind: maker.replaced[id(each)] for kind, each in own.items() if id(each) in maker.replaced})


@dataclass
class _Maker:
    plain: dict[str, nn.Module]
    state: CubeState
    fill: Fill
    known: dict[str, nn.Parameter]
    holders: Holders | None
    weights: dict[str, Weight] = field(default_factory=dict)
    replaced: dict[int, nn.Parameter] = field(default_factory=dict)  # by the id of the plain parameter

    def make(self, spec: LayerSpec) -> nn.Module:
        plain, stated = self.plain[spec.name], parameters(spec, self.state.config)
        own = {each.name.rpartition(".")[2]: each for each in stated.values()}

        def parameter(kind: str) -> nn.Parameter | None:
            whole = plain.get_parameter(kind) if kind in own else None
            return None if whole is None else self._parameter(own[kind], whole)

        return make_layer(spec, Making(plain, self.state, parameter, self.weights))

    def _parameter(self, stated: Parameter, whole: nn.Parameter) -> nn.Parameter:
        name = stated.name
        if name not in self.known:
            network, arrangement = self.state.network, stated.arranged()
            shape = list(whole.shape)
            if arrangement is not None:
                shape[arrangement.dim] = arrangement.held
            block, arranged = Block.of(network, tuple(shape), stated.cuts), None
            if arrangement is None:
                values = self.fill(name, block)
            else:
                values = block_values(self.fill, name, block, arrangement)
                first = next(axis for axis, dim in stated.cuts.items() if dim == arrangement.dim)
                copies = None if arrangement.copies == 1 else network.neighbours(first, arrangement.copies)
                arranged = Arranged(arrangement, network, block.offset[arrangement.dim], copies)
            made = distribute(network, values, block.shape, stated.cuts, arrangement)
            workers = (network.coordinates["pipe"],) if self.holders is None else self.holders(name)
            axis = network.across(workers, *stated.partial)
            ranks = network.grid.data * network.grid.z * prod(network.grid.size(each) for each in stated.alike)
            reduction = Reduction(name, axis, ranks, arranged)
            self.state.gradients.register(made, reduction)
            made.requires_grad_(whole.requires_grad)
            self.known[name] = made
        self.replaced[id(whole)] = self.known[name]
        return self.known[name]
