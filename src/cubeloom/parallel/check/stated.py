"""What each kind of layer takes and gives: one layout for each tensor that it is called with, and that of its output.

Dimensions are named: `rows` is the first one, `features` (or `classes`) the one that the layer treats as features. All others
are whole.
"""

from __future__ import annotations

from cubeloom.parallel.forms import (
    DropoutForm,
    EmbeddingForm,
    FirstTokenForm,
    Form,
    LinearForm,
    LossForm,
    NormForm,
    Spread,
    TableForm,
    WholeForm,
)
from cubeloom.parallel.image_forms import (
    ConcatForm,
    ImageForm,
    JoinForm,
    ShareForm,
    SliceForm,
    SquaredLossForm,
)
from cubeloom.parallel.layout import Layout

Stated = tuple[tuple[Layout, ...], Layout]
_SAMPLES = ("data", "z")
_WHOLE = Layout.of(rows=_SAMPLES, features=None)
_NUMBER = Layout.of()


def stated(form: Form) -> Stated:
    match form:
        case LinearForm():
            return (_linear_input(form),), _linear_output(form)
        case NormForm() | DropoutForm():
            return (_stream(form.rows),), _stream(form.rows)
        case EmbeddingForm() | TableForm():
            return (Layout.of(rows=_SAMPLES),), _stream(form.rows)
        case LossForm(whole=True):
            return (_WHOLE, Layout.of(rows=_SAMPLES)), _NUMBER
        case LossForm():
            return (Layout.of(rows=(*_SAMPLES, "x"), classes="y"), Layout.of(rows=_SAMPLES)), _NUMBER
        case FirstTokenForm():
            return (_stream(form.rows),), _WHOLE
        case WholeForm():
            return (_WHOLE,), _WHOLE
        case ImageForm():
            return _image(form)
    raise TypeError(f"no layouts for {type(form).__name__}")


def _stream(rows: Spread) -> Layout:
    return Layout.of(rows=(*_SAMPLES, "y") if rows == Spread.ROWS else _SAMPLES, features="x")


def _linear_input(form: LinearForm) -> Layout:
    return _spread(form.inputs, form.k_axis, form.n_axis)


def _linear_output(form: LinearForm) -> Layout:
    if form.turn:
        return Layout.of(rows=(*_SAMPLES, form.n_axis), features=form.k_axis)
    return _spread(form.outputs, form.n_axis, form.k_axis)


def _spread(spread: Spread, side: str, across: str) -> Layout:
    rows = (*_SAMPLES, across) if spread == Spread.ROWS else _SAMPLES
    return Layout.of(rows=rows, features=(side, across) if spread == Spread.FEATURES else side)


def _image(form: ImageForm) -> Stated:
    own = Layout.of(rows=form.row_axes, features=form.side)
    few = Layout.of(rows=form.row_axes, features=None)
    used_apart = Layout.of(rows=_SAMPLES, features=None, partial_gradient=("x", "y"))
    match form:
        case SliceForm():
            return (used_apart,), own
        case JoinForm():
            return (own,), few
        case ShareForm():
            return (_WHOLE,), used_apart
        case ConcatForm():
            return (own, own), own
        case SquaredLossForm():
            return (few, _WHOLE), _NUMBER
    return (own,), own
