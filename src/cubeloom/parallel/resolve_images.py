"""What `resolve` needs for networks on images: pixels of each layer, and the forms of layers at their edges."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cubeloom.parallel import cut as declared
from cubeloom.parallel.cut import CutError, Kind
from cubeloom.parallel.forms import Spread
from cubeloom.parallel.image_forms import (
    BatchNormForm,
    ConcatForm,
    GroupedForm,
    GroupNormForm,
    ImageForm,
    JoinForm,
    ShareForm,
    SliceForm,
    SquaredLossForm,
    StayForm,
)
from cubeloom.parallel.products import Convolution, Convolve

Rows = tuple[int, int]  # of a sample, into a layer and out of it


def rows_of_layers(model: nn.Module) -> dict[str, Rows]:
    """Where rows are not tokens: the pixels of a sample that go into and come out of each layer.

    Seen in a run on the meta device of a model that has an `example` of its inputs; others have tokens.
    """
    if not hasattr(model, "example"):
        return {}
    seen: dict[str, Rows] = {}

    def watch(name: str, layer: nn.Module) -> RemovableHandle:
        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = _rows(layer, inputs[0]), _rows(layer, output)

        return layer.register_forward_hook(note)

    hooks = [
        watch(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Convolution)
    ]
    with torch.no_grad():
        model(**model.example(2))  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    return seen


def _rows(layer: nn.Module, tensor: Tensor) -> int:
    """`[samples, pixels, features]` of a linear, `[samples, features, pixels…]` of a convolution."""
    return math.prod(tensor.shape[1:-1] if isinstance(layer, nn.Linear) else tensor.shape[2:])


def sizes(name: str, module: nn.Linear | Convolution) -> tuple[int, int, int]:
    """Input features, output features, and the numbers a weight has for each pair."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features, 1
    Convolve.like(module)  # refuses what it cannot do
    if module.groups > 1:
        raise CutError(f"layer {name} is a convolution in {module.groups} groups; the cut can take it as Grouped")
    return module.in_channels, module.out_channels, math.prod(module.kernel_size)


def image_form(name: str, module: nn.Module, kind: Kind, rows: Spread, pixels: Rows | None) -> ImageForm | None:
    """The form of a layer that is no linear and no convolution inside the network; None if the cut cannot mean that."""
    bias = getattr(module, "bias", None) is not None
    match kind, module:
        case declared.Norm(), nn.GroupNorm():
            interleaved = getattr(module, "order", None) is not None
            return GroupNormForm(
                name, kind.side, rows, module.num_channels, module.affine, module.num_groups, interleaved
            )
        case declared.Norm(), nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d():
            return BatchNormForm(name, kind.side, rows, module.num_features, module.affine)
        case declared.Slice(), nn.Linear() | Convolution():
            return SliceForm(name, kind.side, rows, *sizes(name, module), bias)
        case declared.Join(), nn.Linear() | Convolution() if pixels is not None:
            return JoinForm(name, kind.side, rows, *sizes(name, module), bias, pixels)
        case declared.Stay(), nn.Linear() | Convolution() if pixels is not None:
            return StayForm(name, kind.side, rows, *sizes(name, module), bias, pixels)
        case declared.Grouped(), nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            n, k, *window = module.weight.shape
            return GroupedForm(name, kind.side, rows, k * module.groups, n, math.prod(window), bias, module.groups)
        case declared.Share(), nn.Module():
            return ShareForm(name, "x", rows, kind.features)
        case declared.Concat(), nn.Module(parts=int(parts)):
            return ConcatForm(name, kind.side, rows, parts)
        case declared.SquaredLoss(), nn.Module():
            return SquaredLossForm(name, kind.side, rows)
    return None
