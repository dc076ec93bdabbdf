"""The cut layers of a foreign model: the cube's linear, between whole features or between cut ones."""

from __future__ import annotations

from torch import Tensor, nn

from cubeloom.parallel.foreign.placed import Placed
from cubeloom.parallel.layers.alike import all_parts_of, own_part_of
from cubeloom.parallel.layers.linear import CubeLinear
from cubeloom.parallel.products import Product
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight


class ForeignLinear(CubeLinear):
    """`[…, K]` whole, or `[…, K/side]` inside a chain -> `[…, N/other]` inside a chain, or `[…, N]` whole.

    All ranks of x and y have the same rows. For a convolution features are dimension 1.
    """

    def __init__(
        self, layer: Placed, state: CubeState, weight: Weight, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__(layer.spec, state, weight, bias, product)
        along_k, along_n = (state.network.axis(axis) for axis in (layer.spec.k_axis, layer.spec.n_axis))
        self._enters = along_k if layer.enters else None
        self._leaves = along_n if layer.leaves else None
        self._dim = layer.dim

    def forward(self, x: Tensor) -> Tensor:
        if self._enters is not None:
            x = own_part_of(x, self._enters, self._dim, f"{self._name} enter")
        y = super().forward(x)
        return y if self._leaves is None else all_parts_of(y, self._leaves, self._dim, f"{self._name} leave")
