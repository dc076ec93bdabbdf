"""Checks whether a model with a cut computes what the serial model does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.parallel.check import where
from cubeloom.parallel.check.inputs import Example, Given, inputs_of
from cubeloom.parallel.check.layers import Layers
from cubeloom.parallel.check.probes import probe
from cubeloom.parallel.check.record import Record
from cubeloom.parallel.check.replay import replayed
from cubeloom.parallel.check.tracked import Factor, Tracked, local_shape
from cubeloom.parallel.config import Batch, ParallelConfig
from cubeloom.parallel.cut import CutError, LayerError, lookup
from cubeloom.parallel.layers.declared import Declared
from cubeloom.parallel.specs import AttentionSpec, LayerSpec, LinearSpec

_AXES = ("data", "z", "y", "x")


def check(
    model: nn.Module,
    cut: Mapping[str, Declared],
    specs: Sequence[LayerSpec],
    config: ParallelConfig,
    batch: Batch,
    example: Example | None = None,
) -> dict[str, Tracked]:
    """How what the model gives lies. Raises CutError, with file and line, where a rank would compute something else."""
    sizes = {axis: int(config.size(axis)) for axis in _AXES}
    if prod(sizes.values()) == 1:
        return {}
    between = [spec for spec in specs if spec.gives(config) is None]
    specs = [spec for spec in specs if spec.gives(config) is not None]
    modules = dict(model.named_modules())
    kinds = {spec.name: kind for spec in specs if (kind := lookup(cut, spec.name)) is not None}
    _refuse_shared(model, kinds)
    with _without_modes(), _told(between, modules, config):
        for spec in specs:
            probe(spec, modules[spec.name])
        inputs = inputs_of(model, batch, example)
        record = Record(model, [spec.name for spec in specs], inputs.arguments(), _widths(specs, config))
        record.run(inputs.arguments())
        parts = {name: _part(name, each, sizes) for name, each in inputs.tensors.items()}
        return replayed(record, Layers(modules, specs, kinds, sizes, config), parts, inputs.others)


def _widths(specs: Sequence[LayerSpec], config: ParallelConfig) -> dict[str, int]:
    """The output features of layers with padded or copied rows: the size over all ranks is the whole size here."""
    linears = [spec for spec in specs if isinstance(spec, LinearSpec)]
    return {spec.name: int(spec.held(config)) for spec in linears if spec.held(config) != spec.n}


@contextmanager
def _told(specs: Sequence[LayerSpec], modules: Mapping[str, nn.Module], config: ParallelConfig) -> Iterator[None]:
    """If copies of keys have fewer queries each, the attention modules are told, in both runs."""
    attentions: dict[Any, AttentionSpec] = {
        modules[spec.name]: spec for spec in specs if isinstance(spec, AttentionSpec)
    }
    for module, spec in attentions.items():
        module.queries_per_key = spec.queries_here(config)
    try:
        yield
    finally:
        for module, spec in attentions.items():
            module.queries_per_key = spec.queries


def _refuse_shared(model: nn.Module, kinds: Mapping[str, Declared]) -> None:
    """Refuse a layer that two modules share: only one of them would get the layer that replaces it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    held: dict[int, tuple[str, int, str]] = {}
    for name, layer in modules.items():
        owner, _, attribute = name.rpartition(".")
        first, *place = held.setdefault(id(layer), (name, id(modules[owner]), attribute))
        if first in kinds and place != [id(modules[owner]), attribute]:
            raise LayerError(
                first,
                f"layer {first} ({type(layer).__name__}) is {name} as well, and only one of them would be cut: make it two"
                " layers, which may share a weight",
            )


class _Looking(Record):
    """Stops at the first call of a layer."""

    def __init__(self, model: nn.Module, layers: Sequence[str], inputs: dict[str, Any], wanted: str) -> None:
        super().__init__(model, layers, inputs)
        self.found, self._wanted = "", wanted

    def layer(self, name: str, plain: Any, args: Any, kwargs: Any) -> Tensor:
        if name == self._wanted and not self.found:
            self.found = where.here({})
        return super().layer(name, plain, args, kwargs)


def where_called(model: nn.Module, name: str, batch: Batch, example: Example | None = None) -> str:
    """The file and line that call a layer; empty if they are not found."""
    layers = [
        each for each, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    ]
    try:
        inputs = inputs_of(model, batch, example).arguments()
        looking = _Looking(model, list(dict.fromkeys([*layers, name])), inputs, name)
    except CutError:  # no example
        return ""
    with _without_modes(), suppress(UserError):
        looking.run(inputs)
    return looking.found


def _part(name: str, given: Given, sizes: dict[str, int]) -> tuple[Tensor, Tracked]:
    """A rank's part of an input."""
    layout = given.layout.on(sizes)
    if len(layout.dims) != given.tensor.dim():
        raise CutError(f"the example's {name} has {given.tensor.dim()} dimensions, and its layout is {given.layout}")
    cuttings = [tuple((axis, sizes[axis]) for axis in axes) for _, axes in layout.dims]
    for size, cutting in zip(given.tensor.shape, cuttings, strict=True):
        if size % prod(each for _, each in cutting):
            raise CutError(f"the example's {name}, {list(given.tensor.shape)}, cannot be cut as {given.layout}")
    dims = tuple(
        () if size == 1 else (Factor(size, cutting),)
        for size, cutting in zip(given.tensor.shape, cuttings, strict=True)
    )
    tracked = Tracked(dims, layout.partial_gradient)
    empty = torch.empty(local_shape(dims), dtype=given.tensor.dtype, device="meta")
    return empty.requires_grad_(given.tensor.requires_grad), tracked


@contextmanager
def _without_modes() -> Iterator[None]:
    """Turn off other modes: also in a rehearsal, the tensors here are plain ones on the meta device."""
    modes = torch_private.take_off_dispatch_modes()
    try:
        yield
    finally:
        torch_private.put_on_dispatch_modes(modes)
