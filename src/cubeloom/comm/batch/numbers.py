"""Rules of functions that compute each sample's numbers by themselves, or sums over samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.operations import POINTWISE
from cubeloom.comm.axis import Axis
from cubeloom.comm.batch.call import NOT_FOLLOWED, Call
from cubeloom.comm.batch.parts import Parts
from cubeloom.comm.batch.sums import Average, Sum

# Where each function takes its dimension, counting the tensor as the first argument; by default all, or that behind.
_REDUCTIONS = {
    **dict.fromkeys(("sum", "mean", "nansum", "prod", "all", "any", "amax", "amin", "max", "min", "argmax"), 1),
    **dict.fromkeys(("argmin", "std", "var", "std_mean", "var_mean", "median", "nanmedian", "logsumexp"), 1),
    **dict.fromkeys(("count_nonzero",), 1),
    **dict.fromkeys(("norm", "linalg_vector_norm"), 2),
}
_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), 1),
    **dict.fromkeys(("sort", "argsort", "glu"), 1),
    **dict.fromkeys(("topk", "normalize"), 2),
}
_DEFAULTS = {"sort": -1, "argsort": -1, "glu": -1, "topk": -1, "normalize": 1}
_BY_TYPE = ("to", "type_as")
_HALVES = (torch.float16, torch.bfloat16)


def pointwise(call: Call) -> Any:
    if call.name in _BY_TYPE:
        return _typed(call)
    # Of a condition alone `where` gives places, of which each rank has as many as it finds.
    if call.behind is None or (call.name == "where" and len(call.args) + len(call.kwargs) == 1):
        return NOT_FOLLOWED
    return call.results(call.run(call.aligned), call.behind)


def _typed(call: Call) -> Any:
    """Only the first tensor has values that are used."""
    found = call.run(lambda each: each.part if isinstance(each, Parts) else each)
    return call.like.like(found, call.first.cut) if isinstance(call.first, Parts) else found


def reduction(call: Call) -> Any:
    if len(call.tensors) > 1:
        return pointwise(call) if call.name in ("max", "min") else NOT_FOLLOWED
    dims = _dims(call)
    like = call.like
    if dims is not None and like.cut not in dims:
        found = call.run(call.part)
        kept = call.kwargs.get("keepdim") or any(each is True for each in call.args[1:])
        return call.results(found, like.behind if kept else like.behind - sum(dim > like.cut for dim in dims))
    if call.name not in _OVER_RANKS:
        return NOT_FOLLOWED
    return call.value(_OVER_RANKS[call.name](call))


def _dims(call: Call) -> list[int] | None:
    """None: all."""
    place = _REDUCTIONS[call.name]
    given = call.argument(place, "dim", "axis")
    if isinstance(given, int) and not isinstance(given, bool):
        # `x.sum(0, 1)`: several of them; a truth value behind is `keepdim`.
        rest = call.args[place:] if len(call.args) > place else [given]
        given = [each for each in rest if isinstance(each, int) and not isinstance(each, bool)]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        return None
    return [dim % len(call.like.sizes) for dim in given]


def _sum(call: Call) -> Tensor:
    return _over_ranks(Sum, call)


def _mean(call: Call) -> Tensor:
    return _over_ranks(Average, call)


def _over_ranks(function: Any, call: Call) -> Tensor:
    dtype = call.like.dtype
    wide = dtype in _HALVES and call.name in ("sum", "mean") and call.kwargs.get("dtype") is None
    found = (call.changed(dtype=torch.float32) if wide else call).run(call.part)
    return over(function, found, call.axis, call.name).to(dtype if wide else found.dtype)


def over(function: Any, own: Tensor, axis: Axis, name: str) -> Tensor:
    """Where the ranks communicate."""
    found: Tensor = function.apply(own.to(axis.device), axis, f"{name} of the batch")
    return found.to(own.device)


def _any(call: Call) -> Tensor:
    return over(Sum, call.run(call.part).long(), call.axis, call.name) > 0


def _all(call: Call) -> Tensor:
    return over(Sum, call.run(call.part).logical_not().long(), call.axis, call.name) == 0


_OVER_RANKS = {"sum": _sum, "nansum": _sum, "count_nonzero": _sum, "mean": _mean, "any": _any, "all": _all}


def along(call: Call) -> Any:
    given = call.argument(_ALONG[call.name], "dim", "axis", default=_DEFAULTS.get(call.name))
    if not isinstance(given, int) or isinstance(given, bool) or len(call.tensors) > 1:
        return NOT_FOLLOWED
    if given % len(call.like.sizes) == call.like.cut:
        return NOT_FOLLOWED
    return call.results(call.run(call.part), call.like.behind)


def linear(call: Call) -> Any:
    if len(call.parts) != 1 or not isinstance(call.first, Parts) or call.like.behind < 2:
        return NOT_FOLLOWED
    return call.results(call.run(call.part), call.like.behind)


def product(call: Call) -> Any:
    """Samples are rows of the first matrix, or cut a stack of matrices."""
    if len(call.args) != 2 or call.kwargs:
        return NOT_FOLLOWED
    first, second = call.args
    if isinstance(first, Parts) and not isinstance(second, Parts) and first.behind == 2:
        if second.dim() > 2:
            return NOT_FOLLOWED
        return call.results(call.run(call.part), 2 if second.dim() == 2 else 1)
    if call.behind is None or call.behind < 3 or min(first.dim(), second.dim()) < 2:
        return NOT_FOLLOWED
    return call.results(call.run(call.aligned), call.behind)


def by_index(call: Call) -> Any:
    """`gather` and the like: along a dimension that has no samples."""
    dim = call.argument(2 if call.name == "take_along_dim" else 1, "dim")
    tensor, others = call.first, [each for each in call.tensors if each is not call.first]
    if not isinstance(tensor, Parts) or not isinstance(dim, int) or dim % len(tensor.sizes) == tensor.cut:
        return NOT_FOLLOWED
    if call.name == "index_select":
        return NOT_FOLLOWED if len(call.parts) > 1 else call.results(call.run(call.part), tensor.behind)
    if call.behind is None or any(each.dim() != len(tensor.sizes) for each in others):
        return NOT_FOLLOWED
    return call.results(call.run(call.aligned), call.behind)


def looked_up(call: Call) -> Any:
    """Rows of a table that every rank has."""
    if len(call.parts) != 1 or not isinstance(call.first, Parts) or call.argument(3, "max_norm") is not None:
        return NOT_FOLLOWED
    return call.results(call.run(call.part), call.like.behind + 1)


def one_hot(call: Call) -> Any:
    if call.argument(1, "num_classes", default=-1) < 0:
        return NOT_FOLLOWED
    return call.results(call.run(call.part), call.like.behind + 1)


def of_samples(call: Call) -> Any:
    """Of each sample by itself, where samples come first: `[samples, channels, …]`."""
    dims = _SAMPLES_FIRST[call.name]
    tensor = call.first
    if len(call.parts) != 1 or not isinstance(tensor, Parts) or tensor.cut or (dims and len(tensor.sizes) != dims):
        return NOT_FOLLOWED
    if len(tensor.sizes) < 3 or call.kwargs.get("training") or call.kwargs.get("use_input_stats"):
        return NOT_FOLLOWED
    found = call.run(call.part)
    return call.results(found, found.dim()) if isinstance(found, Tensor) else NOT_FOLLOWED


def normed(call: Call) -> Any:
    shape = call.argument(1, "normalized_shape", default=())
    behind = 1 if isinstance(shape, int) else len(shape)
    if len(call.parts) != 1 or not isinstance(call.first, Parts) or call.like.behind <= behind:
        return NOT_FOLLOWED
    return call.results(call.run(call.part), call.like.behind)


def new(call: Call) -> Any:
    """A tensor that every rank makes whole: only type and device are those of the batch's."""
    return call.run(lambda each: each.own() if isinstance(each, Parts) else each)


_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
_SAMPLES_FIRST = {
    **{f"{pool}{count}d": count + 2 for pool in _POOLS for count in (1, 2, 3)},
    **{f"conv{count}d": count + 2 for count in (1, 2, 3)},
    **{f"conv_transpose{count}d": count + 2 for count in (1, 2, 3)},
    "interpolate": 0,
    "group_norm": 0,
}
RULES = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(_ALONG, along),
    **dict.fromkeys(_SAMPLES_FIRST, of_samples),
    **dict.fromkeys(("gather", "take_along_dim", "index_select"), by_index),
    **dict.fromkeys(("new_tensor", "new_zeros", "new_ones", "new_full", "new_empty"), new),
    **dict.fromkeys(("layer_norm", "rms_norm"), normed),
    **dict.fromkeys(("matmul", "mm", "bmm"), product),
    "linear": linear,
    "embedding": looked_up,
    "one_hot": one_hot,
}
