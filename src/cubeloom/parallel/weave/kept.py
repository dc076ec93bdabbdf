"""Results that a recomputed block keeps: what computed them is not run again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class KeptResults:
    """Of one forward of a block: the results of these layers, each in the order of its calls."""

    layers: frozenset[str] = frozenset()
    results: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, layer: str, result: Tensor) -> None:
        if layer in self.layers:
            self.results.setdefault(layer, []).append(result.detach().requires_grad_(result.requires_grad))

    def again(self) -> dict[str, Iterator[Tensor]]:
        """For one recomputation."""
        return {layer: iter(found) for layer, found in self.results.items()}
