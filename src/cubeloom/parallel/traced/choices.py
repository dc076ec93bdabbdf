"""What is chosen for a model that is traced, beside how each layer takes its features: it is found by trying."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

from cubeloom.parallel.check.tracked import Cutting, Dim
from cubeloom.parallel.cut import pattern_of
from cubeloom.parallel.specs import Side
from cubeloom.parallel.specs.traced import FeatureRest
from cubeloom.parallel.traced.patches import Patch
from cubeloom.parallel.traced.styles import Planned

Way = tuple[Side, FeatureRest]  # the side that the features come from, and how they rest afterwards
Maker = tuple[str, Way]  # a layer, and how it lay when something was chosen because of it


@dataclass(frozen=True)
class Patched:
    """Numbers of a module that were changed, and because of which layer."""

    patch: Patch
    maker: Maker


@dataclass(frozen=True)
class Sliced:
    """An argument of a module's forward of which each rank takes its own part, as this dimension says."""

    argument: str | int  # by name, or by place
    place: int
    dim: Dim


@dataclass(frozen=True)
class CutParameter:
    """A parameter that is used outside of layers, and which these axes cut."""

    place: int
    cutting: Cutting


@dataclass
class Choices:
    """By pattern of names: what holds for one block holds for all."""

    planned: dict[str, Planned] = field(default_factory=dict)  # what a plan says of layers
    barred: dict[str, dict[Way, str]] = field(default_factory=dict)  # ways that do not work, with why
    sections: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # of outputs that are several, one behind another
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of sections, those that every rank has whole
    patches: dict[str, tuple[Patched, ...]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)  # layers whose output ranks use differently: its gradient is summed
    slices: dict[str, tuple[Sliced, ...]] = field(default_factory=dict)
    parameters: dict[str, CutParameter] = field(default_factory=dict)
    dropped: set[object] = field(default_factory=set)  # choices that were taken back

    def copy(self) -> Choices:
        return deepcopy(self)

    def bar(self, name: str, way: Way, why: str) -> None:
        """Never again so; and what was chosen because of it is taken back."""
        self.barred.setdefault(pattern_of(name), {})[way] = why
        self.shared.discard(pattern_of(name))
        for module, made in list(self.patches.items()):
            self.patches[module] = tuple(each for each in made if each.maker != (name, way))

    def is_barred(self, name: str, way: Way) -> bool:
        return way in self.barred.get(pattern_of(name), {})

    def why(self, name: str) -> str:
        """Why it does not lie as it was tried last."""
        return next(reversed(self.barred.get(pattern_of(name), {"": ""}).values()))

    @property
    def patch_of(self) -> Mapping[str, Patch]:
        return {pattern: Patch.joined(each.patch for each in made) for pattern, made in self.patches.items() if made}
