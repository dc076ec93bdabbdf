"""Rules of element-wise operations."""

from __future__ import annotations

from collections.abc import Sequence

from cubeloom.base.operations import POINTWISE
from cubeloom.parallel.check.step import Refused, Rule, Shape, Step, alike
from cubeloom.parallel.check.tracked import Dim, Dims, Factor, axes_of, common, described, is_cut, parts_of, size_of

# Losses with `reduction="none"`: one value per element.
LOSSES = {
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "gaussian_nll_loss",
    "poisson_nll_loss",
    "soft_margin_loss",
}


def pointwise(step: Step) -> list[Dims]:
    """Operands are broadcast; those of `copy_` and similar to the first one, whose shape they must have."""
    step.refuse_other_numbers()
    operands = step.inputs[:1] if step.name in ("to", "type_as") else step.inputs  # the other one only gives its dtype
    return [joined(step.name, [tracked.dims for tracked in operands], step.whole[0])]


def joined(name: str, operands: Sequence[Dims], shape: Shape) -> Dims:
    """The dimensions of operands that are broadcast together."""
    first = operands[0]
    if all(each == first for each in operands[1:]) and len(first) == len(shape):
        return first
    found: list[Dim] = []
    for place in range(len(shape)):
        dim: Dim | None = None
        for dims in operands:
            at = place - len(shape) + len(dims)
            if at < 0 or size_of(dims[at]) == 1:
                continue
            both = dims[at] if dim is None else common(dim, dims[at])
            if both is None:
                raise Refused(_different(name, operands, place, dim or (), dims[at]))
            dim = both
        found.append(dim or ())
    return tuple(found)


def _different(name: str, operands: Sequence[Dims], place: int, first: Dim, second: Dim) -> str:
    names = " and ".join(dict.fromkeys(described(dims) for dims in operands))
    return (
        f"{name} of {names}: dimension {place} is {_said(first)} in one and {_said(second)} in the other, so that a rank has"
        " other parts of them"
    )


def _said(dim: Dim) -> str:
    if not is_cut(dim):
        return "whole"
    if any(factor.ratio > 1 for factor in dim):
        return f"made of the size of 1/{parts_of(dim)}"
    return (
        f"cut over {axes_of(dim)}" if len(dim) == 1 and not dim[0].sections else f"cut as {' x '.join(map(str, dim))}"
    )


def loss_without_reduction(step: Step) -> list[Dims]:
    reduction = step.kwargs.get("reduction", "mean")
    if reduction == "none" and step.kwargs.get("size_average") is None and step.kwargs.get("reduce") is None:
        return pointwise(step)
    return loss(step)


def loss(step: Step) -> list[Dims]:
    """A loss that the cut does not name."""
    for tracked in step.inputs:
        for place, dim in enumerate(tracked.dims):
            if is_cut(dim):
                raise Refused(
                    f"{step.name} of {tracked}, whose dimension {place} is cut over {axes_of(dim)}: each of"
                    f" {parts_of(dim)} ranks would have the loss of its own part. Compute it in a module of its own and name"
                    " it in the cut: Loss() for a cross-entropy, SquaredLoss() for a mean squared error"
                )
    raise Refused(f"{step.name} is a loss that the cut does not know")


def new(step: Step) -> list[Dims]:
    """A constant tensor: a dimension that is smaller on a rank can have any cut."""
    sizes = len(step.whole[0]) if step.name in ("full", "new_full") else len(step.numbers)
    others = [
        (mine, theirs)
        for place, (mine, theirs) in enumerate(zip(step.numbers, step.whole_numbers, strict=False))
        if place >= sizes or not isinstance(mine, int)
    ]
    if len(step.numbers) != len(step.whole_numbers) or not all(alike(*pair) for pair in others):
        step.refuse_other_numbers()
    return [shrunk(step, step.whole[0])]


def shrunk(step: Step, whole: Shape) -> Dims:
    local = step.local[0] if step.local else whole
    if len(local) != len(whole):
        raise Refused(f"{step.name} makes {list(local)} on a rank and {list(whole)} in the serial model")
    return tuple(alike_along(step, one, two) for one, two in zip(whole, local, strict=True))


def alike_along(step: Step, whole: int, local: int) -> Dim:
    """A dimension along which all elements are equal."""
    if whole == local:
        return () if whole == 1 else (Factor(whole),)
    if local == 0 or whole % local:
        raise Refused(f"{step.name} makes {local} on a rank and {whole} in the serial model, which is no multiple")
    return (Factor(whole, (), whole // local),)


def counted_from_zero(step: Step) -> list[Dims]:
    """`arange`, `linspace`, `eye`: created from a local size, they would start again on every rank."""
    if not step.same_numbers or step.local != step.whole:
        local = step.local[0] if step.local else ()
        raise Refused(
            f"{step.name} makes {list(step.whole[0])} in the serial model and {list(local)} on a rank: each rank would begin at"
            " 0. Make it before the tensor is cut, or of a dimension that nothing cuts"
        )
    return [tuple(() if size == 1 else (Factor(size),) for size in shape) for shape in step.whole]


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(LOSSES, loss_without_reduction),
    **dict.fromkeys(("cross_entropy", "nll_loss", "cross_entropy_loss", "ctc_loss", "multi_margin_loss"), loss),
    **dict.fromkeys(("cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss"), loss),
    **dict.fromkeys(("hinge_embedding_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"), loss),
    **dict.fromkeys(("zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty", "full", "new_full"), new),
    **dict.fromkeys(
        ("arange", "range", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "new_tensor"),
        counted_from_zero,
    ),
    **dict.fromkeys(("hann_window", "hamming_window", "blackman_window"), counted_from_zero),
}
