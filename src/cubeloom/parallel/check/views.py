"""Rules of operations that only move or repeat elements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cubeloom.parallel.check.pointwise import alike_along, joined
from cubeloom.parallel.check.step import Refused, Rule, Shape, Step, place_of, places_of, refuse_cut
from cubeloom.parallel.check.tracked import (
    Dim,
    Dims,
    Factor,
    Tracked,
    axes_of,
    described,
    is_cut,
    local_shape,
    normal,
    regrouped,
    size_of,
    uncut,
)


def regroup(step: Step) -> list[Dims]:
    """Views that keep the order of all elements. Their sizes are a rank's own, so only the shapes matter."""
    (tracked,) = step.inputs[:1]
    whole = step.whole[0]
    found = regrouped(tracked.dims, whole)
    if found is None or (step.local and local_shape(found) != step.local[0]):
        raise Refused(_not_a_view(step, tracked, whole, found))
    return [found]


def _not_a_view(step: Step, tracked: Tracked, whole: Shape, found: Dims | None) -> str:
    text = f"{step.name} of {tracked} to {list(whole)}"
    if found is None:
        axes = "·".join(dict.fromkeys(axes_of(dim) for dim in tracked.dims if is_cut(dim)))
        return f"{text}: {axes} cuts a contiguous part for each rank, and those are no parts of the new dimensions. {_OUTER}"
    wanted = list(local_shape(found))
    given = "torch refuses it on a rank" if step.local is None else f"a rank makes {list(step.local[0])} of its part"
    return f"{text}: {given}, where its part of the serial model's is {wanted}, {described(found)}. {_OUTER}"


_OUTER = "The dimension that is cut must come first of those that it is split into, with a size of -1"


def permute(step: Step) -> list[Dims]:
    tracked = step.only
    step.refuse_other_numbers()
    count = len(tracked.dims)
    return [tuple(tracked.dims[place] for place in _order(step, count))]


def _order(step: Step, count: int) -> Sequence[int]:
    order = list(range(count))
    match step.name:
        case "t" | "T":
            return order[::-1]
        case "H" | "mT" | "mH" | "adjoint":
            return [*order[:-2], order[-1], order[-2]]
        case "transpose":
            first, second = (place_of(step.argument(1 + at, f"dim{at}", f"axis{at}"), count) for at in range(2))
            order[first], order[second] = second, first
            return order
        case "movedim":
            source, target = (places_of(step.argument(1 + at, name), count) for at, name in enumerate(_ENDS))
            rest = iter(place for place in order if place not in source)
            moved = dict(zip(target, source, strict=True))
            return [moved[place] if place in moved else next(rest) for place in order]
    # permute(dims) or permute(*dims)
    given = step.args[1:] if isinstance(step.argument(1), int) else step.argument(1, "dims")
    return [place_of(place, count) for place in given]


_ENDS = ("source", "destination")


def expand(step: Step) -> list[Dims]:
    """Repeats dimensions of size one and leaves the others unchanged. A second tensor only gives its shape."""
    tracked, whole = step.inputs[0], step.whole[0]
    local = step.local[0] if step.local else whole
    found: list[Dim] = []
    for place in range(len(whole)):
        at = place - len(whole) + len(tracked.dims)
        dim: Dim = tracked.dims[at] if at >= 0 else ()
        found.append(dim if size_of(dim) > 1 else alike_along(step, whole[place], local[place]))
    _refuse_repeated_gradient(step, found, tracked)
    return [tuple(found)]


def repeat(step: Step) -> list[Dims]:
    """Repeats the whole dimension."""
    tracked, whole = step.inputs[0], step.whole[0]
    local, own = step.local[0] if step.local else whole, local_shape(tracked.dims)
    found: list[Dim] = []
    for place in range(len(whole)):
        at = place - len(whole) + len(tracked.dims)
        dim: Dim = tracked.dims[at] if at >= 0 else ()
        times = whole[place] // size_of(dim), local[place] // (own[at] if at >= 0 else 1)
        found.append(normal((*alike_along(step, *times), *dim)))
    _refuse_repeated_gradient(step, found, tracked)
    return [tuple(found)]


def repeat_interleave(step: Step) -> list[Dims]:
    """Repeats each element."""
    tracked = step.inputs[0]
    times, dim = step.argument(1, "repeats"), step.argument(2, "dim")
    if isinstance(times, Tensor) or not isinstance(dim, int):
        raise Refused("repeat_interleave of a cut tensor takes a number of repeats and a dimension")
    step.refuse_other_numbers()
    place = place_of(dim, len(tracked.dims))
    found = list(tracked.dims)
    found[place] = normal((*found[place], Factor(times)))
    return [tuple(found)]


def _refuse_repeated_gradient(step: Step, found: Sequence[Dim], tracked: Tracked) -> None:
    # The gradients of parameters between layers are averaged over samples.
    known = tracked.parameters or tracked.summands or step.averaged
    if step.needs_gradient[0] and not known and any(factor.ratio > 1 for dim in found for factor in dim):
        raise Refused(
            f"{step.name} repeats {tracked} along a dimension of which a rank has a part: each rank would have a summand of its"
            " gradient",
            [tracked],
        )


def broadcast_all(step: Step) -> list[Dims]:
    dims = joined(step.name, [tracked.dims for tracked in step.inputs], step.whole[0])
    return [dims] * len(step.whole)


def cat(step: Step) -> list[Dims]:
    step.refuse_other_numbers()
    inputs = [tracked for tracked in step.inputs if tracked.shape != (0,)]
    place = place_of(step.argument(1, "dim", "axis", default=0), len(step.whole[0]))
    for tracked in inputs:
        refuse_cut(step, tracked, [place], "put its own parts behind one another")
    rest = [tuple(() if at == place else dim for at, dim in enumerate(tracked.dims)) for tracked in inputs]
    found = list(joined(step.name, rest, step.whole[0]))
    found[place] = uncut([step.whole[0][place]])[0]
    return [tuple(found)]


def stack(step: Step) -> list[Dims]:
    step.refuse_other_numbers()
    count = len(step.whole[0])
    place = place_of(step.argument(1, "dim", default=0), count)
    shape = tuple(size for at, size in enumerate(step.whole[0]) if at != place)
    dims = joined(step.name, [tracked.dims for tracked in step.inputs], shape)
    return [(*dims[:place], *uncut([len(step.inputs)]), *dims[place:])]


def unbind(step: Step) -> list[Dims]:
    tracked = step.only
    place = place_of(step.argument(1, "dim", default=0), len(tracked.dims))
    step.refuse_other_numbers()
    refuse_cut(step, tracked, [place], "take apart its own part")
    return [(*tracked.dims[:place], *tracked.dims[place + 1 :])] * len(step.whole)


def complex_pairs(step: Step) -> list[Dims]:
    tracked = step.only
    if step.name == "view_as_real":
        return [(*tracked.dims, *uncut([2]))]
    refuse_cut(step, tracked, [len(tracked.dims) - 1], "pair its own numbers")
    return [tracked.dims[:-1]]


def pad(step: Step) -> list[Dims]:
    tracked = step.only
    step.refuse_other_numbers()
    widths = tuple(step.argument(1, "pad"))
    count = len(tracked.dims)
    padded = [count - 1 - number // 2 for number, width in enumerate(widths) if width]
    refuse_cut(step, tracked, sorted(set(padded)), "pad its own part")
    return [tuple(uncut([step.whole[0][at]])[0] if at in padded else dim for at, dim in enumerate(tracked.dims))]


def one_hot(step: Step) -> list[Dims]:
    step.refuse_other_numbers()
    return [(*step.inputs[0].dims, *uncut(step.whole[0][-1:]))]


def meshgrid(step: Step) -> list[Dims]:
    step.refuse_other_numbers()
    dims = [tracked.dims[0] if tracked.dims else () for tracked in step.inputs]
    if step.kwargs.get("indexing", "ij") == "xy" and len(dims) > 1:
        dims[:2] = dims[1], dims[0]
    return [tuple(dims)] * len(step.whole)


_REGROUPS = "view reshape view_as reshape_as flatten unflatten ravel squeeze unsqueeze atleast_1d atleast_2d atleast_3d"
RULES: dict[str, Rule] = {
    **dict.fromkeys(_REGROUPS.split(), regroup),
    **dict.fromkeys(("permute", "transpose", "t", "T", "H", "mT", "mH", "adjoint", "movedim"), permute),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    "broadcast_tensors": broadcast_all,
    "cat": cat,
    "stack": stack,
    "unbind": unbind,
    "view_as_real": complex_pairs,
    "view_as_complex": complex_pairs,
    "pad": pad,
    "one_hot": one_hot,
    "meshgrid": meshgrid,
}
