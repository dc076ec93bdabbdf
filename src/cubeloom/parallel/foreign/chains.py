"""From what was seen of a model to where its layers lie: chains that alternate between x and y, and layers alone.

A flow that stays cut links its makers to its takers: where a maker leaves features on y, its takers contract them from y,
and the other way round. A flow that must be whole is gathered by each maker, and each taker takes its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from cubeloom.base.grid import Grid
from cubeloom.parallel.foreign.cost import layer_volume, total
from cubeloom.parallel.foreign.flow import Flow
from cubeloom.parallel.foreign.known import Sizes
from cubeloom.parallel.foreign.placed import Placed, problems, sharded, spec_of
from cubeloom.parallel.foreign.trace import Seen
from cubeloom.parallel.specs import Side, other

_SIDES: tuple[Side, Side] = ("x", "y")


def place(
    seen: Seen, layers: Mapping[str, Sizes], whole: Mapping[str, str], grid: Grid, item: int
) -> tuple[list[Placed], dict[str, str]]:
    """Where the layers lie; and those that are left whole, with why. `whole` are those of which that is known."""
    return _Chains(seen, layers, whole, grid, item).place()


class _Chains:
    def __init__(
        self, seen: Seen, layers: Mapping[str, Sizes], whole: Mapping[str, str], grid: Grid, item: int
    ) -> None:
        self._seen, self._layers, self._grid, self._item = seen, layers, grid, item
        self._whole = dict(whole)
        self._sides: dict[str, list[Side]] = {}  # that the grid divides

    def place(self) -> tuple[list[Placed], dict[str, str]]:
        for name, sizes in self._layers.items():
            self._judge(name, sizes)
        for flow in self._seen.flows:
            for name in sorted(flow.makers | flow.takers):
                if name in self._whole:
                    flow.stop(f"{name} is left whole")
        self._agree()
        placed: dict[str, Placed] = {}
        for name in self._layers:
            if name not in self._whole and name not in placed:
                placed |= {each.name: each for each in self._chain(name)}
        return [placed[name] for name in self._layers if name in placed], self._whole

    def _judge(self, name: str, sizes: Sizes) -> None:
        """Can it be cut, and with its inner dimension on which side?"""
        found = {side: problems(spec_of(name, sizes, side), self._grid) for side in _SIDES}
        self._sides[name] = [side for side in _SIDES if not found[side]]
        if name in self._seen.strange:
            self._whole.setdefault(name, self._seen.strange[name])
        if name not in self._seen.calls:
            self._whole.setdefault(name, "the example does not call it")
        if not self._sides[name]:
            self._whole.setdefault(name, found["x"][0])
        if self._grid.cube == 1:
            self._whole.setdefault(name, "the grid has no cube to cut it over")

    def _agree(self) -> None:
        """A layer has one way in and one way out: where one of its flows must be whole, all are."""
        before = -1
        while before != (now := sum(flow.broken is not None for flow in self._seen.flows)):
            before = now
            entering, leaving = self._ends()
            for flow in self._seen.flows:
                if flow.takers & entering:
                    flow.stop(f"{min(flow.takers & entering)} takes whole features besides")
                if flow.makers & leaving.keys():
                    flow.stop(f"{min(flow.makers & leaving.keys())} gives whole features besides")

    def _ends(self) -> tuple[set[str], dict[str, str]]:
        """Layers that enter, and those that leave with why."""
        entering = set(self._seen.given_whole)
        leaving: dict[str, str] = {}
        for flow in self._seen.flows:
            if not flow.cut():
                entering |= flow.takers
                for maker in flow.makers:
                    leaving.setdefault(maker, flow.broken or "nobody takes its output")
        return entering, leaving

    def _chain(self, first: str) -> list[Placed]:
        """The chain that has this layer, on the side that moves less. A flow that does not fit is made whole."""
        while True:
            members, misfit = self._members(first)
            if misfit is not None:
                misfit.stop("features would have to lie on x and on y")
            elif sides := [side for side in _SIDES if self._fits(members, side)]:
                return min((self._on(members, side) for side in sides), key=self._bytes)
            else:
                link = next(flow for flow in self._seen.flows if flow.cut() and flow.makers & members.keys())
                link.stop("the grid does not divide the features of its chain in turns")
            self._agree()

    def _members(self, first: str) -> tuple[dict[str, bool], Flow | None]:
        """The layers linked to this one, and whether each lies as it does; and a flow that contradicts that."""
        members, queue = {first: True}, [first]
        while queue:
            name = queue.pop()
            for flow in self._seen.flows:
                if not flow.cut() or name not in flow.makers | flow.takers:
                    continue
                if flow.makers & flow.takers:
                    return members, flow
                makers_alike = members[name] == (name in flow.makers)
                for each in flow.makers | flow.takers:
                    alike = makers_alike == (each in flow.makers)
                    if each not in members:
                        members[each] = alike
                        queue.append(each)
                    elif members[each] != alike:
                        return members, flow
        return members, None

    def _fits(self, members: Mapping[str, bool], first: Side) -> bool:
        return all(_side(alike, first) in self._sides[name] for name, alike in members.items())

    def _on(self, members: Mapping[str, bool], first: Side) -> list[Placed]:
        entering, leaving = self._ends()
        specs = {name: spec_of(name, self._layers[name], _side(alike, first)) for name, alike in members.items()}
        return [
            Placed(
                spec,
                sharded(spec, self._grid),
                self._layers[name].dim,
                name in entering,
                name in leaving,
                tuple(self._seen.calls[name]),
                leaving.get(name, ""),
            )
            for name, spec in specs.items()
        ]

    def _bytes(self, chain: list[Placed]) -> Fraction:
        return sum((total(layer_volume(layer, self._grid, self._item)) for layer in chain), Fraction())


def _side(alike: bool, first: Side) -> Side:
    return first if alike else other(first)
