"""Plans: what a Hugging Face model says about its layers (`tp_plan`, `pp_plan`), and a user's plan in the same format.

A plan is for one axis. `STYLES` says what each style means on the plane of x and y. The model's plan is the starting
point of the search for a layer's placement, which may find a better one. A user's plan is followed, or refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from cubeloom.base.errors import UserError
from cubeloom.parallel.cut import lookup, pattern_of
from cubeloom.parallel.specs import Side
from cubeloom.parallel.specs.traced import FeatureRest
from cubeloom.parallel.traced.known import Known, Linear, Norm, Table

Plan = Mapping[str, str]  # from module names, with `*` for numbers, to styles
Origin = Literal["given", "own", "plan", "traced"]
"""Who decided a layer's placement: the user, our cut of one of our models, the model's plan, or tracing alone."""


@dataclass(frozen=True)
class Style:
    """`kinds`: layers that may have it; `side`: of a linear's input features; and the layout of the output."""

    kinds: tuple[type, ...]
    side: Side | None = None
    gives: tuple[FeatureRest, ...] = ()
    whole: bool = False  # the layer is not cut over the plane
    sections: int = 1  # equal, concatenated parts of its outputs


_COLWISE = Style((Linear,), "x", ("both", "one"))
_GATHERED = Style((Linear,), "x", ("lazy", "whole"))
_ROWWISE = Style((Linear,), "y", ("both", "one", "whole"))
_PACKED = Style((Linear,), "x", ("both", "one"), sections=2)
_TABLE = Style((Table,), "y", ("both", "one"))
_REPLICATED = Style((Linear, Table, Norm), whole=True)

STYLES = {
    "colwise": _COLWISE,
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "packed_colwise": _PACKED,
    "rowwise": _ROWWISE,
    "rowwise_split_input": _ROWWISE,
    "rowwise_rep": _ROWWISE,
    "embedding_rowwise": _TABLE,
    "embedding_colwise": _TABLE,
    "sequence_parallel": Style((Norm,)),
    "replicated_with_grad_allreduce": Style((Norm,), whole=True),
    "replicate": _REPLICATED,
}
"""Other styles, such as those of experts, do not determine a single layer's placement: such modules are traced."""


@dataclass(frozen=True)
class Planned:
    """What a plan says about a layer. `given`: by the user."""

    name: str
    style: Style
    given: bool

    def has(self, side: Side, gives: FeatureRest) -> bool:
        return not self.style.whole and gives in self.style.gives and side == self.style.side

    def begins(self, side: Side, gives: FeatureRest) -> bool:
        return self.has(side, gives) and gives == self.style.gives[0]

    def refusal(self, layer: str, why: str) -> str:
        return f"the plan gives {layer} the style {self.name!r}, and it cannot lie so: {why}"


def planned(model: nn.Module, known: Mapping[str, Known], given: Plan | None) -> dict[str, Planned]:
    """By name pattern. The user's plan takes precedence. Raises UserError for a plan that is not possible."""
    found: dict[str, Planned] = {}
    carried = carried_plan(model)
    for name, kind in known.items():
        style = STYLES.get(lookup(carried, name) or "")
        if style is not None and isinstance(kind, style.kinds):
            found[pattern_of(name)] = Planned(str(lookup(carried, name)), style, given=False)
    for key, said in (given or {}).items():
        found |= dict(_given(key, said, model, known))
    return found


def _given(key: str, said: str, model: nn.Module, known: Mapping[str, Known]) -> Iterator[tuple[str, Planned]]:
    style = STYLES.get(said)
    if style is None:
        near = difflib.get_close_matches(said, STYLES, n=1, cutoff=0.0)[0]
        raise UserError(
            f"the plan gives {key} the style {said!r}, which is not known; did you mean {near!r}? The styles are"
            f" {', '.join(STYLES)}"
        )
    names = [name for name, _ in model.named_modules() if key in (name, pattern_of(name))]
    if not names:
        patterns = list(dict.fromkeys(map(pattern_of, known)))
        near = ", ".join(difflib.get_close_matches(key, patterns, n=2, cutoff=0.0))
        raise UserError(
            f"the plan names {key}, and {type(model).__name__} has no module of that name; the nearest: {near}"
        )
    for name in names:
        if not isinstance(known.get(name), style.kinds):
            kinds = " or ".join(each.__name__.lower() for each in style.kinds)
            raise UserError(
                f"the plan gives {name} the style {said!r}, which is for a {kinds}; it is a"
                f" {type(model.get_submodule(name)).__name__}"
            )
        yield pattern_of(name), Planned(said, style, given=True)


def carried_plan(model: nn.Module) -> dict[str, str]:
    """The plan of the model or of modules in it."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        own = getattr(module, "_tp_plan", None)
        if isinstance(own, Mapping):
            for key, style in own.items():
                found.setdefault(f"{name}.{key}".lstrip("."), str(style))
    return found


def carried_rows(model: nn.Module) -> list[str]:
    """The lists of blocks that the model's pipeline plan names."""
    found: list[str] = []
    for name, module in model.named_modules():
        own = getattr(module, "_pp_plan", None)
        names = [f"{name}.{key}".lstrip(".") for key in own] if isinstance(own, Mapping) else []
        found += [each for each in names if each not in found and _is_list(model, each)]
    return found


def _is_list(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), nn.ModuleList | nn.Sequential)
    except AttributeError:
        return False


def origin(planned: Planned | None, side: Side, gives: FeatureRest, left_whole: bool) -> Origin:
    """Who decided the placement of a layer."""
    if planned is None:
        return "traced"
    if planned.given:
        return "given"
    style = planned.style
    follows = style.side is None and style.whole is left_whole
    return "plan" if follows or (not left_whole and planned.has(side, gives)) else "traced"
