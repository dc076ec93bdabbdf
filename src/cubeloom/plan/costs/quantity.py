"""A plain number or an array of them."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

# numpy's own types for "either" do not survive arithmetic; an array of any number type is what broadcasting gives.
Quantity = float | NDArray[Any]
