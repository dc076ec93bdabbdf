"""The rank's call of a layer: checks the layouts of its inputs, and gives the layout of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torch import nn

from cubeloom.base import torch_private
from cubeloom.parallel.check.step import Refused
from cubeloom.parallel.check.tracked import (
    Dim,
    Dims,
    Tracked,
    common,
    described,
    in_sections,
    is_cut,
    named,
)
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layers.declared import Declared, written
from cubeloom.parallel.layout import Axes, Layout
from cubeloom.parallel.products import Convolution
from cubeloom.parallel.specs import (
    ConcatSpec,
    CopyToRegionSpec,
    DropoutSpec,
    FirstTokenSpec,
    LayerSpec,
    LinearSpec,
    LossSpec,
    NormSpec,
    SquaredLossSpec,
)

Shape = tuple[int, ...]
_SECOND = (Convolution, nn.GroupNorm, torch_private.AnyBatchNorm)  # features are dimension 1


class Layers:
    """The layers of a cut on a grid, with the sizes of its axes."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        specs: Sequence[LayerSpec],
        kinds: Mapping[str, Declared],
        sizes: Mapping[str, int],
        config: ParallelConfig,
    ) -> None:
        self._modules, self._kinds, self._sizes = modules, kinds, sizes
        self._specs = {spec.name: spec for spec in specs}
        self._stated = {spec.name: (spec.takes(config), spec.gives(config)) for spec in specs}
        linears = [spec for spec in specs if isinstance(spec, LinearSpec)]
        self._sections = {spec.name: tuple(map(int, spec.held_sections(config))) for spec in linears if spec.sections}

    def __call__(self, name: str, inputs: Sequence[Tracked], needed: Sequence[bool], shape: Shape) -> Tracked:
        spec, module = self._specs[name], self._modules[name]
        title = f"layer {name} ({type(module).__name__}), {written(self._kinds[name])} in the cut,"
        taken, given = self._stated[name]
        if len(inputs) != len(taken):
            raise Refused(f"{title} is called with {len(inputs)} tensors, and takes {len(taken)}")
        if problem := _misfit(spec, module, [tracked.shape for tracked in inputs]):
            raise Refused(f"{title} {problem}")
        for tracked, layout, needs in zip(inputs, taken, needed, strict=True):
            self._check(title, spec, tracked, layout.on(self._sizes), needs)
        assert given is not None
        output = given.on(self._sizes)
        dims = self._lying(title, output, shape, spec, self._sections.get(name, ()))
        return Tracked(dims, output.partial_gradient, frozenset({name}))

    def _check(self, title: str, spec: LayerSpec, tracked: Tracked, layout: Layout, needs: bool) -> None:
        wanted = self._lying(title, layout, tracked.shape, spec)
        # If two dimensions differ, the features give the better message.
        for place, (have, want) in reversed(list(enumerate(zip(tracked.dims, wanted, strict=True)))):
            if common(have, want) is None:
                what = self._name_of(place, layout, spec, len(wanted))
                source = f" from layer {min(tracked.makers)}" if tracked.makers else ""
                raise Refused(
                    f"{title} takes {what} {_said(want)}, and gets {what} {_said(have)}{source}: {tracked}, and not"
                    f" {described(wanted)}{self._hint(spec, what, have)}"
                )
        if needs and tracked.summands != layout.partial_gradient:
            self._refuse_gradient(title, tracked, layout)

    def _refuse_gradient(self, title: str, tracked: Tracked, layout: Layout) -> None:
        if missing := layout.partial_gradient - tracked.summands:
            raise Refused(
                f"{title} uses {tracked} differently on each rank of {'·'.join(sorted(missing))}, and nothing sums the"
                " gradients: pass it through a module that gives it on, nn.Identity(), and name that in the cut: CopyToRegion()"
            )
        axes = "·".join(sorted(tracked.summands - layout.partial_gradient))
        raise Refused(
            f"{title} computes alike on all ranks of {axes} with what a CopyToRegion() gives, whose gradients are summed over"
            " them: only layers that the cut takes as ColwiseFromReplicated() may use it"
        )

    def _lying(self, title: str, layout: Layout, shape: Shape, spec: LayerSpec, sections: tuple[int, ...] = ()) -> Dims:
        """The layout as dimensions of a tensor of this shape, whose features are these sections."""
        places = dict(_places(layout, spec, self._modules[spec.name], len(shape)))
        found: list[Dim] = []
        for place, size in enumerate(shape):
            cutting = tuple((axis, self._sizes[axis]) for axis in places.get(place, ()))
            parts = prod(each for _, each in cutting)
            if size % parts:
                name = "rows" if place == 0 else "features"
                raise Refused(
                    f"{title} needs its {name}, {size} here, cut over {named(cutting)}, which is {parts} parts"
                )
            of_sections = sections and place in places and place > 0
            found.append(in_sections(sections if of_sections else [size], cutting))
        return tuple(found)

    def _name_of(self, place: int, layout: Layout, spec: LayerSpec, count: int) -> str:
        names = [each for each, _ in layout.dims]
        places = [at for at, _ in _places(layout, spec, self._modules[spec.name], count)]
        return names[places.index(place)] if place in places else f"dimension {place}"

    def _hint(self, spec: LayerSpec, what: str, have: Dim) -> str:
        """The kind of layer that would take this input."""
        axes = [axis for factor in have for axis, _ in factor.cutting]
        match spec:
            case LinearSpec() if what == "features":
                if not axes:
                    return ". ColwiseFromReplicated() takes features that are whole"
                kind = {"x": "Expand()", "y": "Contract()"}.get(axes[0])
                return f". {kind} takes features from {axes[0]}" if kind and axes[0] != spec.side else ""
            case LossSpec(whole=False) if what == "rows":
                return ". Its logits come from a layer with Expand(sharded_output=True)"
        return ""


def _places(layout: Layout, spec: LayerSpec, module: nn.Module, count: int) -> list[tuple[int, Axes]]:
    """The positions of a layout's named dimensions in a tensor with `count` dimensions."""
    second = isinstance(module, _SECOND) or isinstance(spec, ConcatSpec)
    features = 1 if second or count < 2 else count - 1
    return [(0 if number == 0 else features, axes) for number, (_, axes) in enumerate(layout.dims)]


def _said(dim: Dim) -> str:
    if not is_cut(dim):
        return "whole"
    if len(dim) > 1 or dim[0].ratio > 1 or dim[0].sections:
        return f"cut as {' x '.join(map(str, dim))}"
    return f"cut over {named(dim[0].cutting)}"


def _misfit(spec: LayerSpec, module: nn.Module, shapes: Sequence[Shape]) -> str | None:
    """What the sharded layer does not support for inputs of these shapes, although the plain layer does."""
    first = shapes[0]
    match spec:
        case LinearSpec(turn=True) if isinstance(module, nn.Linear) and len(first) != 2:
            return f"turns [rows, features], and gets {len(first)} dimensions: flatten all but the last"
        case LossSpec(whole=False) if len(first) != 2 or len(shapes[1]) != 1:
            return f"takes logits [rows, classes] and targets [rows], and gets {list(first)} and {list(shapes[1])}"
        case SquaredLossSpec() if shapes[0] != shapes[1]:
            return f"compares tensors of one shape, and gets {list(shapes[0])} and {list(shapes[1])}"
        case DropoutSpec(probability=p) if p > 0 and len(first) != 2:
            return f"takes [rows, features], and gets {len(first)} dimensions: flatten all but the last"
        case FirstTokenSpec() if len(first) != 2:
            return f"takes [rows, features], and gets {list(first)}"
        case NormSpec(features=features) if first[-1] != features:
            return f"normalises more than the last dimension of {list(first)}, which has no form here"
        case FirstTokenSpec(features=features) | CopyToRegionSpec(features=features) if first[-1] != features:
            return f"is said to have {features} features in the cut, and gets {list(first)}"
        case ConcatSpec() if len(first) < 2 or shapes[0][:1] + shapes[0][2:] != shapes[1][:1] + shapes[1][2:]:
            return f"joins dimension 1 of tensors that are equal otherwise, and gets {list(shapes[0])} and {list(shapes[1])}"
    if isinstance(module, Convolution) and len(first) != module.weight.dim():
        return f"takes samples, features and {module.weight.dim() - 2} dimensions of pixels, and gets {list(first)}"
    return None
