"""Attention on whole heads: the plain module, for the heads that a rank has."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from torch import nn

from cubeloom.parallel.cut import CutError
from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.specs import AttentionSpec, Side


@dataclass(frozen=True)
class Attention(Declared):
    """Attention between queries, keys and values that are cut by heads: it has no parameters, and mixes whole heads.

    Of so many key-value heads, each with so many queries. The module's `queries_per_key` becomes that of the rank's heads.
    """

    heads: int
    queries: int
    axis: Side = "y"  # that cuts heads

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
    """The plain module computes what it is given; where a key has fewer queries here, it is told so."""
    queries = spec.queries_here(making.state.config)
    if queries == spec.queries:
        return making.plain
    own = copy(making.plain)
    own.queries_per_key = queries  # type: ignore[assignment]
    return own
