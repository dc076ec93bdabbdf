"""Where a layer of a foreign model lies, as pure values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cubeloom.base.grid import Grid
from cubeloom.parallel.cut import Side
from cubeloom.parallel.foreign.known import Sizes
from cubeloom.parallel.foreign.trace import Call
from cubeloom.parallel.forms import Batch, LinearForm, Spread, other


@dataclass(frozen=True)
class Placed:
    """A layer that is cut. It takes its part of whole features if it `enters`, and makes them whole again if it `leaves`."""

    form: LinearForm
    dim: int  # that is features
    enters: bool
    leaves: bool
    calls: tuple[Call, ...]
    why: str  # it leaves, in words

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def numbers(self) -> int:
        """In its parameters."""
        form = self.form
        return form.k * form.n * form.taps + (form.n if form.bias else 0)

    def held(self, grid: Grid) -> int:
        """Of these, one rank's."""
        form = self.form
        parts = grid.x * grid.y * (1 if form.weights == "replicated" else grid.z)
        return form.k * form.n * form.taps // parts + (form.n // grid.size(form.bias_axis) if form.bias else 0)

    @property
    def gradient(self) -> bool:
        """Whether the gradient of its input is ever wanted."""
        return any(call.gradient for call in self.calls)


@dataclass(frozen=True)
class Whole:
    """A module whose own parameters every rank of the plane has in full, and computes with."""

    name: str
    kind: str
    why: str
    numbers: int  # of its parameters that no module before it has
    summed: int  # of these, trained by the example


# Gradients of what is left whole are averaged over the plane too: its ranks compute the same, but a GPU does not repeat its
# rounding (in the backward of attention, for instance), and replicas would drift apart.
WHOLE_AXES = ("data", "z", "x", "y")


def bias_axes(form: LinearForm) -> tuple[str, ...]:
    """The axes over which the gradient of a bias is reduced: those that do not cut it."""
    return ("data", "z", other(form.bias_axis))


def form_of(name: str, sizes: Sizes, side: Side, grid: Grid) -> LinearForm:
    """Activations replicated; the weight is cut over z too, where that divides it."""
    form = LinearForm(
        name,
        sizes.k,
        sizes.n,
        side,
        inputs=Spread.REPLICATED,
        outputs=Spread.REPLICATED,
        weights="freed",
        saved="kept",
        bias=sizes.bias,
        taps=sizes.taps,
        transposed=sizes.transposed,
    )
    return replace(form, weights="replicated") if problems(form, grid) else form


def problems(form: LinearForm, grid: Grid) -> list[str]:
    """What the grid does not divide. Nothing here depends on the batch: rows are never cut."""
    return list(form.problems(grid, Batch(grid.data * grid.z, 1)))
