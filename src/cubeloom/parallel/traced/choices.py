"""The choices for a traced model, besides the layout of each layer's features. They are found by trial."""

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

Way = tuple[Side, FeatureRest]  # the side of the input features, and the layout of the output features
Maker = tuple[str, Way]  # a layer, and its layout when something was chosen because of it


@dataclass(frozen=True)
class Patched:
    """Numbers of a module that were changed, and the layer because of which they were."""

    patch: Patch
    maker: Maker


@dataclass(frozen=True)
class Sliced:
    """An argument of a module's forward of which each rank takes its part, as this dimension says."""

    argument: str | int  # by name, or by position
    place: int
    dim: Dim


@dataclass(frozen=True)
class CutParameter:
    """A parameter that is used outside of layers, or a buffer, that these axes cut."""

    place: int
    cutting: Cutting


@dataclass
class Choices:
    """By name pattern: what holds for one block holds for all."""

    planned: dict[str, Planned] = field(default_factory=dict)  # what a plan says about layers
    barred: dict[str, dict[Way, str]] = field(default_factory=dict)  # layouts that do not work, with the reasons
    sections: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # the sections of outputs that are several, concatenated
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the sections that every rank has whole
    patches: dict[str, tuple[Patched, ...]] = field(default_factory=dict)
    # layers whose output ranks use differently, so its gradient is summed
    shared: set[str] = field(default_factory=set)
    slices: dict[str, tuple[Sliced, ...]] = field(default_factory=dict)
    parameters: dict[str, CutParameter] = field(default_factory=dict)
    dropped: set[object] = field(default_factory=set)  # choices that were revoked

    def copy(self) -> Choices:
        return deepcopy(self)

    def bar(self, name: str, way: Way, why: str) -> None:
        """Exclude this layout, and revoke what was chosen because of it."""
        self.barred.setdefault(pattern_of(name), {})[way] = why
        self.shared.discard(pattern_of(name))
        for module, made in list(self.patches.items()):
            self.patches[module] = tuple(each for each in made if each.maker != (name, way))

    def is_barred(self, name: str, way: Way) -> bool:
        return way in self.barred.get(pattern_of(name), {})

    def why(self, name: str) -> str:
        """Why the layout that was tried last does not work."""
        return next(reversed(self.barred.get(pattern_of(name), {"": ""}).values()))

    @property
    def patch_of(self) -> Mapping[str, Patch]:
        return {pattern: Patch.joined(each.patch for each in made) for pattern, made in self.patches.items() if made}
