"""Vocabularies that a grid does not divide: embedding and head are padded, and the loss knows which classes there are.

Padding is zero. No lookup finds it, and logits end before it, so that its gradient is exactly zero: any optimizer leaves it
zero, weight decay too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cubeloom.base.grid import Grid
from cubeloom.parallel.arrangement import Arrangement, padded
from cubeloom.parallel.cut import CutError, Weights
from cubeloom.parallel.forms import EmbeddingForm, Form, LinearForm, LossForm


def pad_vocabularies(forms: Iterable[Form], grid: Grid) -> list[Form]:
    """The same forms with padded tables and heads, and their losses."""
    found = list(forms)
    heads = _heads(found)
    arranged = {name: _padded(head.n, head.weights, grid) for name, head in heads.items()}

    def pad(form: Form) -> Form:
        match form:
            case EmbeddingForm():
                rows = _padded(form.entries, form.weights, grid)
                return form if rows is None else replace(form, entries=rows.held, arranged=rows)
            case LinearForm() if (rows := arranged.get(form.name)) is not None:
                return replace(form, n=rows.held, arranged=rows)
            case LossForm(head=str(head)):
                return replace(form, arranged=arranged.get(head))
        return form

    return [pad(form) for form in found]


def own_classes(form: LinearForm, grid: Grid, place: int) -> int | None:
    """How many outputs of the rank at this place are no padding; None where all are, as of every layer but a head."""
    if form.arranged is None:
        return None
    part = form.n // grid.size(form.n_axis)
    filled = form.arranged.filled(place * part, (place + 1) * part)
    return None if filled == part else filled


def _heads(forms: Iterable[Form]) -> dict[str, LinearForm]:
    """The layers that losses name as their heads, and that can be padded: those that lead to y."""
    linears = {form.name: form for form in forms if isinstance(form, LinearForm)}
    found = {}
    for loss in forms:
        if not isinstance(loss, LossForm) or loss.head is None:
            continue
        if loss.head not in linears:
            raise CutError(
                f"layer {loss.name}: its head is to be {loss.head!r}, which the cut does not have as an Expand; those that it "
                f"has: {', '.join(name for name, each in linears.items() if each.n_axis == 'y')}"
            )
        head = linears[loss.head]
        if head.n_axis == "y" and not head.turn and not loss.whole:
            found[head.name] = head
    return found


def _padded(rows: int, weights: Weights, grid: Grid) -> Arrangement | None:
    """Rows of a table or a head lie on y, and within that on z where weights are sharded."""
    return padded(rows, grid.y * (1 if weights == "replicated" else grid.z))
