"""Rules of operations along dimensions that must be whole: reductions, softmax, sorting, pooling, splitting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from cubeloom.parallel.check.pointwise import joined, pointwise
from cubeloom.parallel.check.step import Refused, Rule, Shape, Span, Step, place_of, places_of, refuse_cut, spans
from cubeloom.parallel.check.tracked import Dims, Tracked, is_cut, uncut

# The position of each function's dimension argument, counting the tensor as the first; all dimensions by default.
_REDUCTIONS = {
    **dict.fromkeys(("sum", "mean", "nansum", "nanmean", "prod", "all", "any", "amax", "amin", "max", "min"), 1),
    **dict.fromkeys(("argmax", "argmin", "std", "var", "std_mean", "var_mean", "median", "nanmedian", "mode"), 1),
    **dict.fromkeys(("logsumexp", "count_nonzero", "aminmax"), 1),
    **dict.fromkeys(("norm", "linalg_vector_norm", "quantile", "nanquantile", "kthvalue", "linalg_norm"), 2),
}
# Along one dimension, whose size in the result may differ.
_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), 1),
    **dict.fromkeys(("sort", "argsort", "msort", "glu"), 1),
    **dict.fromkeys(("topk", "normalize", "diff", "renorm"), 2),
}
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("sort", "argsort", "topk", "glu", "diff"), -1),
    **dict.fromkeys(("normalize",), 1),
    **dict.fromkeys(("mode", "kthvalue"), -1),
    "msort": 0,
}
_WORDS = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmin", "normalize", "layer_norm", "rms_norm"), "normalise its own part"
    ),
    **dict.fromkeys(("sort", "argsort", "topk"), "sort its own part"),
    **dict.fromkeys(("split", "chunk", "tensor_split", "narrow", "select", "unsafe_chunk"), "take it of its own part"),
}
_LOSSLIKE = ("sum", "mean", "nanmean", "nansum")


def _consequence(name: str) -> str:
    return _WORDS.get(name, "compute it of its own part")


def reduction(step: Step) -> list[Dims]:
    """The dimensions are removed, or have size one."""
    if step.name in ("max", "min") and len(step.inputs) == 2:
        return pointwise(step)
    step.refuse_other_numbers()
    tracked = step.only
    count = len(tracked.dims)
    given = _dims_given(step, _REDUCTIONS[step.name])
    places = places_of(given, count)
    words = _consequence(step.name)
    if step.name in _LOSSLIKE:
        words += (
            ". If this is the loss: of a model that is traced, take its mean over samples, or let the model give what it is"
            " made of and compute it outside, where any loss is that of the whole batch; in a cut of your own, compute it in a"
            " module of its own and name that: Loss(), SquaredLoss()"
        )
    refuse_cut(step, tracked, places, words)
    kept = len(step.whole[0]) == count
    found = tuple(() if at in places else dim for at, dim in enumerate(tracked.dims) if kept or at not in places)
    return [found] * len(step.whole)


def _dims_given(step: Step, place: int) -> Any:
    default = _DEFAULTS.get(step.name)
    given = step.argument(place, "dim", "axis", default=default)
    if isinstance(given, int) and not isinstance(given, bool) and len(step.args) > place + 1:
        # `x.sum(0, 1)`: several dimensions; a bool after them is `keepdim`.
        return [each for each in step.args[place:] if isinstance(each, int) and not isinstance(each, bool)]
    return given if isinstance(given, int | list | tuple) else default


def along(step: Step) -> list[Dims]:
    step.refuse_other_numbers()
    tracked = step.only
    place = place_of(_along_dim(step), len(tracked.dims))
    refuse_cut(step, tracked, [place], _consequence(step.name))
    return _replaced(step, tracked, [place])


def _along_dim(step: Step) -> int:
    given = step.argument(_ALONG[step.name], "dim", "axis", default=_DEFAULTS.get(step.name))
    if not isinstance(given, int) or isinstance(given, bool):
        raise Refused(f"{step.name} of a cut tensor needs its dimension said")
    return given


def _replaced(step: Step, tracked: Tracked, places: Sequence[int]) -> list[Dims]:
    """These dimensions are whole, with the size that they have in the serial model."""
    return [
        tuple(uncut([shape[at]])[0] if at in places else dim for at, dim in enumerate(tracked.dims))
        for shape in step.whole
    ]


def several(step: Step) -> list[Dims]:
    """`flip` and `roll`, along some dimensions or all."""
    step.refuse_other_numbers()
    tracked = step.only
    given = step.argument(1 if step.name == "flip" else 2, "dims")
    if step.name == "flip" and isinstance(given, int):
        given = step.args[1:]
    places = places_of(given, len(tracked.dims))
    refuse_cut(step, tracked, places, f"{step.name} its own part")
    return [tracked.dims]


def last(step: Step) -> list[Dims]:
    """Along the last dimensions: norms, masks of a triangle."""
    step.refuse_other_numbers()
    tracked = step.inputs[0]
    count = len(tracked.dims)
    behind = 2 if step.name in ("tril", "triu") else len(tuple(_shape(step.argument(1, "normalized_shape"))))
    refuse_cut(step, tracked, range(count - behind, count), _consequence(step.name))
    weights = [each.dims for each in step.inputs[1:]] if step.name not in ("tril", "triu") else []
    return [joined(step.name, [tracked.dims, *weights], step.whole[0])]


def batch_norm(step: Step) -> list[Dims]:
    """With fixed statistics an element-wise function; in training, of all dimensions but the channels."""
    step.refuse_other_numbers()
    tracked, *channels = step.inputs
    if step.argument(5, "training", default=False):
        others = [place for place in range(len(tracked.dims)) if place != 1]
        refuse_cut(step, tracked, others, "have the statistics of its own samples")
    rest = ((),) * (len(tracked.dims) - 2)
    return [joined(step.name, [tracked.dims, *((*each.dims, *rest) for each in channels)], step.whole[0])]


def columns(step: Step) -> list[Dims]:
    """`functional.unfold`, blocks of pixels as columns; the method of that name takes windows of a dimension."""
    if len(step.whole[0]) != 3 or len(step.inputs[0].dims) != 4:
        refuse_cut(step, step.inputs[0], range(len(step.inputs[0].dims)), _consequence(step.name))
    return of_samples(step)


def fourier(step: Step) -> list[Dims]:
    step.refuse_other_numbers()
    tracked = step.only
    given = step.argument(
        2, "dim", default=-1 if step.name in ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft") else None
    )
    places = places_of(given, len(tracked.dims))
    refuse_cut(step, tracked, places, _consequence(step.name))
    return _replaced(step, tracked, places)


def of_samples(step: Step) -> list[Dims]:
    """Convolutions and norms between layers: each sample separately, and all of its channels."""
    step.refuse_other_numbers()
    tracked, *weights = step.inputs
    refuse_cut(step, tracked, range(1, len(tracked.dims)), _consequence(step.name))
    for weight in weights:
        refuse_cut(step, weight, range(len(weight.dims)), _consequence(step.name))
    return [(tracked.dims[0], *uncut(step.whole[0][1:]))]


def _shape(sizes: Any) -> Sequence[int]:
    return (sizes,) if isinstance(sizes, int) else sizes


def split(step: Step) -> list[Dims]:
    """Splits a dimension into parts; `select` and `narrow` take one of them."""
    tracked = step.only
    count = len(tracked.dims)
    at = {"select": 1, "narrow": 1}.get(step.name, 2)
    place = place_of(step.argument(at, "dim", default=0), count)
    if step.name == "select":
        refuse_cut(step, tracked, [place], _consequence(step.name))
        step.refuse_other_numbers()
        return [(*tracked.dims[:place], *tracked.dims[place + 1 :])]
    if not is_cut(tracked.dims[place]):
        step.refuse_other_numbers()
        return _replaced(step, tracked, [place])
    if step.name == "narrow" and len(step.args) < 4:
        raise Refused(f"narrow of {tracked} along dimension {place} takes all its numbers by place, without names")
    whole, own = _taken(step, step.whole, place, step.whole_numbers), None
    if step.local is not None:
        own = _taken(step, step.local, place, step.numbers)
    found = spans(step, tracked, place, whole, own, _consequence(step.name))
    return [(*tracked.dims[:place], dim, *tracked.dims[place + 1 :]) for dim in found]


def _taken(step: Step, results: Sequence[Shape], place: int, numbers: Sequence[Any]) -> list[Span]:
    """The spans that results of these shapes take of a dimension: consecutive, or as `narrow` says."""
    first = numbers[1] if step.name == "narrow" else 0
    return list(pairwise(accumulate((shape[place] for shape in results), initial=first)))


def take(step: Step) -> list[Dims]:
    """`gather`, `take_along_dim` and `index_select`: indices along a whole dimension."""
    step.refuse_other_numbers()
    if len(step.inputs) != 2 and not (step.name == "scatter" and len(step.inputs) < 4):
        raise Refused(f"{step.name} of {len(step.inputs)} tensors has no rule")
    tracked, index, *values = step.inputs
    count = len(tracked.dims)
    dim = step.argument(2, "dim") if step.name == "take_along_dim" else step.argument(1, "dim")
    if not isinstance(dim, int):
        raise Refused(f"{step.name} of a cut tensor needs its dimension said")
    place = place_of(dim, count)
    refuse_cut(step, tracked, [place], "look for it in its own part")
    if step.name == "index_select":
        (rows,) = index.dims or ((),)
        return [(*tracked.dims[:place], rows, *tracked.dims[place + 1 :])]
    if any(one != two for at, (one, two) in enumerate(zip(tracked.shape, index.shape, strict=True)) if at != place):
        raise Refused(f"{step.name} of {tracked} by indices {index} of another shape")
    rest = tuple(() if at == place else dim for at, dim in enumerate(tracked.dims))
    if step.name == "scatter":
        others = [tuple(() if at == place else dim for at, dim in enumerate(each.dims)) for each in (index, *values)]
        found = joined(step.name, [rest, *others], tuple(1 if at == place else n for at, n in enumerate(tracked.shape)))
        return [(*found[:place], tracked.dims[place], *found[place + 1 :])]
    return [joined(step.name, [rest, index.dims], step.whole[0])]


def looked_up(step: Step) -> list[Dims]:
    """`embedding`: rows of a table with whole entries."""
    step.refuse_other_numbers()
    index, table = step.inputs
    refuse_cut(step, table, [0], "look for it in its own part")
    return [(*index.dims, table.dims[1])]


def planes(dimensions: int) -> Rule:
    """Pooling and similar operations over the last dimensions."""

    def rule(step: Step) -> list[Dims]:
        step.refuse_other_numbers()
        tracked = step.only
        count = len(tracked.dims)
        places = range(count - dimensions, count)
        refuse_cut(step, tracked, places, "pool its own part")
        return _replaced(step, tracked, places)

    return rule


def resampled(step: Step) -> list[Dims]:
    """`[samples, channels, pixels...]`."""
    return planes(len(step.inputs[0].dims) - 2)(step)


def cosine(step: Step) -> list[Dims]:
    """The similarity of two tensors along a dimension, which is removed."""
    step.refuse_other_numbers()
    shape = tuple(max(sizes) for sizes in zip(*(each.shape for each in step.inputs), strict=True))
    dims = joined(step.name, [each.dims for each in step.inputs], shape)
    place = place_of(step.argument(2, "dim", default=1), len(shape))
    refuse_cut(step, Tracked(dims), [place], "sum over its own part")
    return [(*dims[:place], *dims[place + 1 :])]


_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(_ALONG, along),
    **dict.fromkeys(("flip", "roll"), several),
    **dict.fromkeys(("layer_norm", "rms_norm", "tril", "triu"), last),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "narrow", "select"), split),
    **dict.fromkeys(("gather", "take_along_dim", "index_select", "scatter"), take),
    **{
        f"{pool}{count}d{end}": planes(count) for pool in _POOLS for count in (1, 2, 3) for end in ("", "_with_indices")
    },
    **dict.fromkeys(("interpolate", "upsample"), resampled),
    "batch_norm": batch_norm,
    **{
        f"fft_{inverse}{real}fft{end}": fourier for inverse in ("", "i") for real in ("", "r") for end in ("", "2", "n")
    },
    **dict.fromkeys(("group_norm", "instance_norm", "fold"), of_samples),
    "unfold": columns,
    **{f"conv{kind}{count}d": of_samples for kind in ("", "_transpose") for count in (1, 2, 3)},
    "cosine_similarity": cosine,
    "embedding": looked_up,
}
