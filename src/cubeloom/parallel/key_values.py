"""Fewer key-value heads than ranks on the axis that cuts heads: the queries of a head are divided, its key and value copied.

As in Megatron-LM, but that a projection's rows are `[head, queries + 2, head_dim]`: on y=4 two heads of six queries become four
groups of three queries, a key and a value, one for each rank. Queries keep their order, so that what follows attention lies as
it does in the serial model. Gradients of copies are summed over the ranks that have them, neighbours on the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from cubeloom.base.grid import Grid
from cubeloom.parallel.amounts import Volume, Words, add, ring
from cubeloom.parallel.arrangement import grouped
from cubeloom.parallel.cut import Attention, CutError
from cubeloom.parallel.forms import Form, LinearForm
from cubeloom.parallel.grouped_heads import copies_of


@dataclass(frozen=True)
class AttentionForm(Form):
    """Attention on this rank's heads, where a key has fewer queries here than in the serial model."""

    queries_per_key: int

    def on(self, plain: nn.Module) -> nn.Module:
        """The plain module for this rank's heads: it computes what it is given, and has no parameters."""
        own = copy(plain)
        own.queries_per_key = self.queries_per_key  # type: ignore[assignment]
        return own


def attention_forms(name: str, module: nn.Module, kind: Attention, grid: Grid) -> list[Form]:
    """None where attention is on this rank what it is in the serial model, on fewer heads."""
    if not hasattr(module, "queries_per_key"):
        raise CutError(f"layer {name} is a {type(module).__name__} without queries_per_key: it cannot be an Attention")
    copies = copies_of(kind.heads, kind.queries, grid.size(kind.axis))
    return [AttentionForm(name, kind.queries // copies)] if copies > 1 else []


def arrange_heads(forms: Iterable[Form], grid: Grid) -> list[Form]:
    """The same forms with the rows of projections to queries, keys and values as ranks hold them.

    Raises CutError where what follows would take them for other heads than they are.
    """
    found = list(forms)
    attentions = {form.queries_per_key for form in found if isinstance(form, AttentionForm)}
    return [_arranged(form, grid, attentions) if isinstance(form, LinearForm) else form for form in found]


def _arranged(form: LinearForm, grid: Grid, attentions: set[int]) -> LinearForm:
    """`attentions`: how many queries have a key where attention is not as in the serial model."""
    if form.heads is None or form.queries is None:
        return form
    gives = form.n_axis == form.head_axis  # to attention; else it takes what attention gives
    features, parts = (form.n, form.queries + 2) if gives else (form.k, form.queries)
    if form.transposed or features % (form.heads * parts):
        lies = "[heads, queries + 2, head_dim]" if gives else "[heads, queries, head_dim]"
        raise CutError(
            f"layer {form.name}: {features} features are not {lies} with heads={form.heads} and queries={form.queries}"
        )
    copies = copies_of(form.heads, form.queries, grid.size(form.head_axis))
    if copies == 1 or not gives:
        return form
    if form.queries // copies not in attentions:
        raise CutError(
            f"layer {form.name}: on {form.head_axis}={grid.size(form.head_axis)} a key has {form.queries // copies} of its "
            f"{form.queries} queries, and the cut names no Attention(heads={form.heads}, queries={form.queries}) that knows it"
        )
    rows = grouped(form.heads, form.queries, form.n // (form.heads * parts), copies)
    return replace(form, n=rows.held, arranged=rows)


def shared_copies(forms: Iterable[Form]) -> set[tuple[str, int]]:
    """The groups that sum gradients of copies: on which axis, and of how many neighbours."""
    arranged = [(form.n_axis, form.arranged) for form in forms if isinstance(form, LinearForm) and form.arranged]
    return {(axis, rows.copies) for axis, rows in arranged if rows.copies > 1}


@dataclass(frozen=True)
class _Copied:
    """A parameter that has copies of rows: the axes that cut its rows, and those over which its gradient is reduced."""

    form: LinearForm
    cut: tuple[str, ...]
    reduced: tuple[str, ...]
    columns: int  # numbers of a row that a rank has

    def rows(self, grid: Grid, workers: Sequence[int], here: Mapping[str, int], zero: bool) -> int:
        """Copied rows among those whose gradient this rank sums: of its block, or of the part of it that it updates."""
        assert self.form.arranged is not None
        start, length = 0, self.form.n
        for axis in self.cut:
            length //= grid.size(axis)
            start += here[axis] * length
        replicas = len(workers) * prod(grid.size(axis) for axis in self.reduced)
        if zero and length % replicas == 0:
            place = workers.index(here["pipe"]) if len(workers) > 1 else 0
            for axis in self.reduced:
                place = place * grid.size(axis) + here[axis]
            length //= replicas
            start += place * length
        return sum(run.length for run in self.form.arranged.runs(start, start + length) if run.copies > 1)


def _copied(form: LinearForm, grid: Grid) -> Iterator[tuple[str, _Copied]]:
    """By the parameter's name."""
    replicated = form.weights == "replicated"
    cut = (form.n_axis,) if replicated else (form.n_axis, "z")
    columns = form.k * form.taps // grid.size(form.k_axis)
    yield f"{form.shares or form.name}.weight", _Copied(form, cut, ("data", "z") if replicated else ("data",), columns)
    if form.bias:
        yield f"{form.name}.bias", _Copied(form, (form.bias_axis,), form.bias_replicas, 1)


def copies_volume(
    forms: Iterable[Form],
    grid: Grid,
    words: Words,
    here: Mapping[str, int],
    zero: bool = False,
    holders: Callable[[str], Sequence[int]] | None = None,
) -> Volume:
    """What the sums over copies bring to the rank at these coordinates. It may have none: z and replicas cut rows further.

    `holders`: the workers of a pipeline that hold a parameter of this name.
    """
    moved: list[Volume] = []
    known: dict[str, _Copied] = {}
    for form in forms:
        if isinstance(form, LinearForm) and form.arranged is not None and form.arranged.copies > 1:
            known |= dict(_copied(form, grid))
    for name, each in known.items():
        assert each.form.arranged is not None
        workers = (here.get("pipe", 0),) if holders is None else holders(name)
        size = each.rows(grid, workers, here, zero) * each.columns * words.gradient
        moved.append({each.form.n_axis: 2 * ring(each.form.arranged.copies) * size})
    return add(*moved)
