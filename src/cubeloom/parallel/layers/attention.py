"""Attention over whole heads: the plain module, applied to a rank's heads."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from torch import nn

from cubeloom.parallel.cut import CutError
from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.specs import AttentionSpec, Side


@dataclass(frozen=True)
class Attention(Declared):
    """Attention of queries, keys and values that are cut by heads. It has no parameters.

    `heads`: number of key-value heads; `queries`: queries per head. The module's `queries_per_key` is set to that of
    the rank.
    """

    heads: int
    queries: int
    axis: Side = "y"  # the axis that cuts heads

    def spec(self, name: str, module: nn.Module, seen: Seen) -> AttentionSpec | None:
        if not hasattr(module, "queries_per_key"):
            raise CutError(
                f"layer {name} is a {type(module).__name__} without queries_per_key: it cannot be an Attention"
            )
        return AttentionSpec(
            name=name,
            heads=self.heads * self.queries,
            kv_heads=self.heads,
            head_dim=int(getattr(module, "head_dim", 0)),
            head_axis=self.axis,
            rotary=getattr(module, "rotary_base", None) is not None,
            causal=bool(getattr(module, "causal", False)),
        )


@make_layer.register
def _(spec: AttentionSpec, making: Making) -> nn.Module:
    """The plain module. If the rank has fewer queries per key, its `queries_per_key` is set."""
    queries = spec.queries_here(making.state.config)
    if queries == spec.queries:
        return making.plain
    own = copy(making.plain)
    own.queries_per_key = queries  # type: ignore[assignment]
    return own
