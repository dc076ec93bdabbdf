"""Chooses the layouts of the layers of a model without a cut: it is run as a rank, and each layer takes its input as it
comes.

A linear with input features on x has output features on y, and the reverse. Features that are cut thus stay cut until
an operation between layers needs another layout. That operation is refused, as in any check, and its inputs are then
given another layout:

    cut over both axes          [rows, N/(y·x)]   whole heads, an MLP; [rows, N/(x·y)] of the stream
    cut over one axis           [rows, N/y]
    whole, but not gathered yet [rows, N]         logits, whose loss is computed from the parts
    whole                       [rows, N]         gathered

Layers whose names differ only in numbers have the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from cubeloom.parallel.check.step import Refused
from cubeloom.parallel.check.tracked import Dim, Dims, Tracked, described, in_sections, size_of, uncut
from cubeloom.parallel.cut import pattern_of
from cubeloom.parallel.specs import Call, Side, other
from cubeloom.parallel.specs.traced import FeatureRest
from cubeloom.parallel.traced.choices import Choices
from cubeloom.parallel.traced.known import ChannelNorm, Known, Linear, Norm, Table
from cubeloom.parallel.traced.styles import Planned

Shape = tuple[int, ...]
PLANE = ("x", "y")
# The order in which layouts are given up: what is cut most comes first.
_LEVELS: dict[FeatureRest, int] = {"both": 0, "one": 1, "lazy": 4, "whole": 5}
_STREAM = 3


@dataclass
class Use:
    """One call of a layer, with a rank's rows. `source` is the same if the input is the same tensor."""

    call: Call
    source: int
    fixed: bool = False  # the number of rows does not depend on the number of samples


@dataclass
class Placed:
    """The layout of a layer: the side of its input features, and the layout of features before and after it.

    `differing`: axes whose ranks have other parts of the rows of a layer that is left whole.
    """

    known: Known
    side: Side
    taken: FeatureRest
    given: FeatureRest
    left_whole: bool = False
    differing: tuple[str, ...] = ()
    sections: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()  # the sections that every rank has whole
    shared: bool = False  # ranks use the replicated output differently
    uses: list[Use] = field(default_factory=list)

    def lies_as(self, other: Placed) -> bool:
        return self._lies == other._lies

    @property
    def _lies(self) -> tuple[object, ...]:
        return self.side, self.taken, self.given, self.left_whole, self.differing, self.shared

    @property
    def level(self) -> int:
        """How far the layout has been given up."""
        stream = self.given == "one" and not (isinstance(self.known, Linear) and self.side == "x")
        return _STREAM if stream else _LEVELS[self.given]


class Placing:
    """Chooses the layouts of layers during a rank's run. `tied`: layers that share another layer's weight."""

    def __init__(
        self, known: Mapping[str, Known], sizes: Mapping[str, int], choices: Choices, tied: Mapping[str, str]
    ) -> None:
        self._known, self._sizes = known, sizes
        self.choices = choices
        # Layers that share a table's weight have the table's layout.
        pairs = [pair for pair in tied.items() if any(isinstance(known.get(each), Table) for each in pair)]
        self._of_tables = {name for pair in pairs for name in pair}
        self.placed: dict[str, Placed] = {}
        self.live = True  # whether the loss depends on the current call

    def __call__(self, name: str, inputs: Sequence[Tracked], needed: Sequence[bool], shape: Shape) -> Tracked:
        if len(inputs) != 1:
            raise Refused(f"layer {name} is called with {len(inputs)} tensors")
        (tracked,) = inputs
        match self._known[name]:
            case Linear() as linear:
                placed, dims = self._linear(name, linear, tracked, shape)
            case Table() as table:
                placed, dims = self._table(name, table, tracked, shape)
            case Norm() as norm:
                placed, dims = _norm(name, norm, tracked, shape, self.choices.planned.get(pattern_of(name)))
            case ChannelNorm() as channels:
                placed, dims = _channel_norm(name, channels, tracked)
        self._keep(name, placed, tracked, needed[0], shape)
        if isinstance(placed.known, Norm | ChannelNorm):
            return Tracked(dims, tracked.summands, tracked.makers)
        if tracked.summands and needed[0]:
            raise Refused(
                f"layer {name} computes alike on all ranks of {'·'.join(sorted(tracked.summands))} with {tracked}"
            )
        return Tracked(
            dims, self._summands(placed, dims), frozenset({name}) if _axes(dims) or placed.shared else frozenset()
        )

    def _summands(self, placed: Placed, dims: Dims) -> frozenset[str]:
        """Axes along which its output is replicated, and each rank has a partial sum of its gradient."""
        if not placed.shared:
            return frozenset()
        return frozenset(axis for axis in PLANE if self._sizes[axis] > 1 and axis not in _axes(dims))

    def parts(self, placed: Placed) -> int:
        """The number of parts of its outputs."""
        return prod(self._sizes[axis] for axis in self._given_axes(other(placed.side), placed.given))

    def _keep(self, name: str, placed: Placed, tracked: Tracked, gradient: bool, shape: Shape) -> None:
        before = self.placed.setdefault(name, placed)
        if not before.lies_as(placed):
            raise Refused(f"layer {name} is called twice, with features that lie differently")
        place = _feature_place(placed.known, len(shape))
        features = 1 if isinstance(placed.known, Table) else tracked.shape[place]
        rows_in, rows_out = prod(tracked.shape) // features, prod(shape) // shape[place]
        call = Call(rows_in, rows_out, gradient, live=self.live)
        before.uses.append(Use(call, id(tracked), fixed=not tracked.of_samples))

    def _linear(self, name: str, linear: Linear, tracked: Tracked, shape: Shape) -> tuple[Placed, Dims]:
        place = _feature_place(linear, len(shape))
        cut = _axes(tracked.dims)
        if len(tracked.dims) < 2 or linear.rank not in (None, len(shape)):
            if cut:
                raise Refused(f"layer {name} gets {len(tracked.dims)} dimensions")
            return Placed(linear, "x", "whole", "whole", left_whole=True), self._dims(tracked, shape, place, ())
        _refuse_cut_rows(name, tracked, place)
        planned = self.choices.planned.get(pattern_of(name))
        for side, taken, given in self._ways(linear, tracked.dims[place], planned):
            if (name in self._of_tables and (side != "x" or linear.transposed)) or self.choices.is_barred(
                name, (side, given)
            ):
                continue
            axes = self._given_axes(other(side), given)
            if self._divides(linear, given, other(side), *axes):
                sections = self.choices.sections.get(pattern_of(name), ()) if axes else ()
                kept = self.choices.kept.get(pattern_of(name), ()) if given == "both" and sections else ()
                parts, weights = prod(self._sizes[axis] for axis in axes), self._sizes[other(side)]
                needed = [weights if number in kept else parts for number in range(len(sections))]
                if any(size % least for size, least in zip(sections, needed, strict=True)):
                    continue
                dims = self._dims(tracked, shape, place, axes, sections, kept)
                shared = given in ("one", "whole") and pattern_of(name) in self.choices.shared
                return Placed(linear, side, taken, given, sections=sections, kept=kept, shared=shared), dims
        if planned is not None and planned.given and not planned.style.whole:
            raise Refused(planned.refusal(name, self.choices.why(name) or f"it gets {tracked}"))
        if cut:
            raise Refused(f"layer {name}, {linear.k} to {linear.n} features, cannot be cut as {tracked} lies")
        return Placed(linear, "x", "whole", "whole", left_whole=True), self._dims(tracked, shape, place, ())

    def _ways(
        self, linear: Linear, dim: Dim, planned: Planned | None
    ) -> Iterator[tuple[Side, FeatureRest, FeatureRest]]:
        """Layouts in order: first what the model's own plan says, then what is cut most. With a user's plan only that.

        If a plan gathers outputs, their loss may not need that, and other uses may accept cut outputs.
        """
        if len(dim) > 1 or any(factor.sections for factor in dim):
            raise Refused(f"it gets features that lie as {described((dim,))}")
        sources: dict[tuple[str, ...], list[tuple[Side, FeatureRest]]] = {
            ("x",): [("x", "one")],
            ("y",): [("y", "one")],
            ("y", "x"): [("y", "both")],
            ("x", "y"): [("x", "both")],
            (): [("x", "whole"), ("y", "whole")],
        }
        givens: tuple[FeatureRest, ...] = ("both", "one", "lazy", "whole")
        found = [
            (side, taken, given)
            for side, taken in sources.get(_axes([dim]), [])
            for given in givens
            if linear.k % self._sizes[side] == 0
        ]
        found.sort(key=lambda each: _LEVELS[each[2]])
        if planned is None:
            return iter(found)
        if planned.given:
            return (each for each in found if planned.has(each[0], each[2]))
        return iter(sorted(found, key=lambda each: not planned.begins(each[0], each[2])))

    def _given_axes(self, side: Side, given: FeatureRest) -> tuple[Side, ...]:
        axes: dict[FeatureRest, tuple[Side, ...]] = {"both": (side, other(side)), "one": (side,)}
        return tuple(axis for axis in axes.get(given, ()) if self._sizes[axis] > 1)

    def _divides(self, linear: Linear, given: FeatureRest, *axes: str) -> bool:
        """Outputs that appear whole are padded if they are the weight's rows."""
        if given in ("lazy", "whole") and linear.dim == -1 and not linear.transposed:
            return True
        return linear.n % prod(self._sizes[axis] for axis in dict.fromkeys(axes)) == 0

    def _table(self, name: str, table: Table, tracked: Tracked, shape: Shape) -> tuple[Placed, Dims]:
        if _axes(tracked.dims):
            raise Refused(f"layer {name} looks up {tracked}, of which a rank has a part")
        planned = self.choices.planned.get(pattern_of(name))
        bound = planned if planned is not None and planned.given else None
        if bound is not None and not bound.style.whole and table.features % self._sizes["x"]:
            raise Refused(bound.refusal(name, f"x={self._sizes['x']} does not divide {table.features} features"))
        if (bound is not None and bound.style.whole) or table.features % self._sizes["x"]:
            return Placed(table, "y", "whole", "whole", left_whole=True), self._dims(tracked, shape, -1, ())
        ways: tuple[FeatureRest, ...] = ("both", "one")
        for given in ways:
            axes = self._given_axes("x", given)
            fits = table.features % prod(self._sizes[axis] for axis in axes) == 0
            if fits and not self.choices.is_barred(name, ("y", given)):
                return Placed(table, "y", "whole", given), self._dims(tracked, shape, -1, axes)
        return Placed(table, "y", "whole", "whole"), self._dims(tracked, shape, -1, ())

    def _dims(
        self,
        tracked: Tracked,
        shape: Shape,
        place: int,
        axes: Sequence[Side],
        sections: tuple[int, ...] = (),
        kept: tuple[int, ...] = (),
    ) -> Dims:
        """Rows are cut as those of the input."""
        dims = list(uncut(shape))
        for at, (dim, size) in enumerate(zip(tracked.dims, shape, strict=False)):
            if at != place % len(shape) and size_of(dim) == size:
                dims[at] = dim
        if axes:
            cutting = tuple((axis, self._sizes[axis]) for axis in axes)
            dims[place] = in_sections(sections or [shape[place]], cutting, kept)
        return tuple(dims)


def _norm(name: str, norm: Norm, tracked: Tracked, shape: Shape, planned: Planned | None) -> tuple[Placed, Dims]:
    last = tracked.dims[-1]
    axes = _axes([last])
    if norm.features != shape[-1] or len(last) > 1 or (axes and any(factor.sections for factor in last)):
        raise Refused(f"layer {name} normalises {norm.features} features of {tracked}")
    if not axes:  # replicated on all ranks, or consisting of whole heads
        differing = tuple(sorted({*_axes(tracked.dims), *tracked.summands}))
        return Placed(norm, "x", "whole", "whole", left_whole=True, differing=differing), tracked.dims
    _refuse_cut_rows(name, tracked, len(shape) - 1)
    if planned is not None and planned.given and planned.style.whole:
        raise Refused(planned.refusal(name, f"it gets {tracked}"))
    rest: FeatureRest = "both" if len(axes) > 1 else "one"
    differing = tuple(sorted(tracked.summands))
    return Placed(norm, "x" if axes[0] == "x" else "y", rest, rest, differing=differing), tracked.dims


def _channel_norm(name: str, norm: ChannelNorm, tracked: Tracked) -> tuple[Placed, Dims]:
    features = tracked.dims[1]
    axes = _axes([features])
    _refuse_sections(name, tracked, features)
    _refuse_cut_rows(name, tracked, 1)
    differing = tuple(sorted(tracked.summands))
    rest: FeatureRest = ("whole", "one", "both")[len(axes)]
    left_whole = not axes and norm.groups is not None
    side: Side = "x" if axes[:1] != ("y",) else "y"
    return Placed(norm, side, rest, rest, left_whole=left_whole, differing=differing), tracked.dims


def _refuse_sections(name: str, tracked: Tracked, features: Dim) -> None:
    """A weight is cut into one block."""
    if len(features) > 1 or any(factor.sections for factor in features):
        raise Refused(f"layer {name} gets features that lie as {tracked}")


def _axes(dims: Sequence[Dim]) -> tuple[str, ...]:
    """The axes of the plane; samples may be cut in any case."""
    return tuple(axis for dim in dims for factor in dim for axis, _ in factor.cutting if axis in ("x", "y"))


def _feature_place(known: Known, count: int) -> int:
    second = isinstance(known, ChannelNorm) or (isinstance(known, Linear) and known.dim == 1)
    return 1 if second else count - 1


def _refuse_cut_rows(name: str, tracked: Tracked, features: int) -> None:
    rows = [dim for place, dim in enumerate(tracked.dims) if place != features]
    if _axes(rows):
        raise Refused(f"layer {name} gets {tracked}, whose rows are cut")


def kept_along(tracked: Tracked) -> frozenset[str]:
    """The axes that cut some of its sections, while every rank has the others whole."""
    return frozenset(axis for dim in tracked.dims for factor in dim if factor.kept for axis, _ in factor.cutting)


def of_plane(tracked: Tracked, alike: bool) -> Tracked:
    """Without the axes that cut samples; and without what is `alike` for all of them."""
    dims = tuple(
        tuple(
            replace(
                factor,
                cutting=tuple(each for each in factor.cutting if each[0] in PLANE),
                ratio=factor.ratio if alike else 1,
            )
            for factor in dim
        )
        for dim in tracked.dims
    )
    return replace(tracked, dims=dims)


def samples_cut(tracked: Tracked) -> bool:
    return any(axis not in PLANE for axis in tracked.axes)
