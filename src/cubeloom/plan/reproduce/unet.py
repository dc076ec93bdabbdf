"""A U-Net's layers as Tensor3D cuts them, where this library cuts them differently.

In the authors' code every res block takes its input on the same axis: the first convolution, the skip's and the linear
of the time are cut both ways, the second convolution is transposed. Here blocks take their input as it comes, and skip
and time are on one axis only. This moves fewer bytes but leaves them whole on a plane of one row, such as
Megatron-LM's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cubeloom.parallel import specs
from cubeloom.parallel.specs import LayerSpec, other
from cubeloom.plan.model import Model, Piece


def as_tensor3d(model: Model) -> Model:
    return replace(model, kinds=tuple(map(_piece, model.kinds)))


def _piece(piece: Piece) -> Piece:
    first = next((layer for layer in piece.layers if layer.name.endswith("conv1")), None)
    if not isinstance(first, specs.LinearSpec):
        return piece
    turned = first.side == "y"
    return replace(piece, layers=tuple(_cut(_exchanged(layer) if turned else layer) for layer in piece.layers))


def _exchanged(layer: LayerSpec) -> LayerSpec:
    """The same with x and y exchanged."""
    sides: dict[str, Any] = {
        name: other(getattr(layer, name)) for name in ("side", "head_axis") if hasattr(layer, name)
    }
    return replace(layer, **sides)


def _cut(layer: LayerSpec) -> LayerSpec:
    if isinstance(layer, specs.EdgeSpec) and layer.kind in ("rowwise_scatter", "colwise"):
        return specs.LinearSpec(
            name=layer.name,
            k=layer.k,
            n=layer.n,
            side="x",
            bias=layer.bias,
            kernel_numel=layer.kernel_numel,
            pixels=layer.pixels,
        )
    return layer
