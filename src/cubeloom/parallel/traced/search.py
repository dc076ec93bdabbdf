"""Searches for the layouts of a model's layers: runs it as a rank again and again, with changes, until nothing is
refused.

Each time it keeps the change with which the run gets furthest. If no change helps, the layer that computed the refused
input gives up its layout for one that is cut less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.parallel.check.run import META
from cubeloom.parallel.check.tracked import Cutting, Dim, Factor, Tracked, local_shape, size_of, uncut
from cubeloom.parallel.cut import CutError, pattern_of
from cubeloom.parallel.outputs import Outputs
from cubeloom.parallel.traced.choices import Choices, CutParameter, Maker, Patched, Sliced
from cubeloom.parallel.traced.known import Known, Linear
from cubeloom.parallel.traced.misplaced import LossUse, Misplaced
from cubeloom.parallel.traced.parts import buffers_to_cut
from cubeloom.parallel.traced.patches import GROUPS, HEADS, WIDTHS, Patch, patch_of, patched
from cubeloom.parallel.traced.placing import PLANE, Placed, Placing
from cubeloom.parallel.traced.rank_run import RankRun
from cubeloom.parallel.traced.styles import Planned
from cubeloom.parallel.traced.whole_run import WholeRun, recorded, run_with

_MOST_TRIES = 400


@dataclass
class Found:
    """The layouts of the layers, and what was seen between them."""

    placed: dict[str, Placed]
    choices: Choices
    partial: Mapping[str, frozenset[str]]  # for parameters used between layers: axes whose ranks have partial gradients
    losses: list[LossUse]
    calls: Mapping[str, int]  # how often each module runs
    reads: Mapping[str, int]  # how often code outside of its module uses each parameter
    live: set[str]  # parameters outside of cut layers that the loss depends on
    flops: tuple[float, float]  # of matmuls between layers: of the whole, and of a rank
    outputs: Outputs = field(default_factory=dict)  # the layouts of what the model gives
    averaged: frozenset[str] = frozenset()  # outputs that are a mean over a rank's own samples


@dataclass
class _Tried:
    """One run as a rank, to its end or to a refused operation."""

    choices: Choices
    placing: Placing
    run: RankRun
    refused: Misplaced | None

    @property
    def reached(self) -> float:
        return float("inf") if self.refused is None else self.refused.reached


class Search:
    def __init__(
        self,
        model: nn.Module,
        known: Mapping[str, Known],
        sizes: Mapping[str, int],
        inputs: Mapping[str, Any],
        tied: Mapping[str, str],
        planned: Mapping[str, Planned],
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`say` is told of everything that is refused on the way."""
        self._model, self._sizes, self._inputs, self._tied, self._say = model, sizes, inputs, tied, say
        self._record, self._known = recorded(model, known, inputs, {})
        self._records = {frozenset[tuple[str, str | int]](): self._record}
        self._tries = 0
        self._start = Choices(planned=dict(planned))
        for name, each in self._known.items():
            sections = planned[pattern_of(name)].style.sections if pattern_of(name) in planned else 1
            if sections > 1 and isinstance(each, Linear) and each.n % sections == 0:
                self._start.sections[pattern_of(name)] = (each.n // sections,) * sections

    def find(self) -> Found:
        """Raises CutError if nothing works."""
        tried = self._try(self._start)
        while (refused := tried.refused) is not None:
            if self._say is not None:
                self._say(f"{refused} | {sorted(set(map(pattern_of, refused.makers)))}")
            if self._tries > _MOST_TRIES:
                raise CutError(f"no place was found for the layers of {type(self._model).__name__}: {refused}")
            changed = [self._try(choices) for choices in self._changes(tried, refused)]
            best = max(changed, key=lambda each: each.reached, default=None)
            if best is not None and best.reached > tried.reached:
                tried = best
                continue
            less = self._less(tried, refused)
            if less is None:
                raise CutError(str(refused))
            tried = self._try(less)
        run = tried.run
        flops = run.flops[0], run.flops[1]
        record, live = self._record, self._live(run)
        return Found(
            tried.placing.placed, tried.choices, run.partial, run.losses, record.forwards, record.reads, live, flops
        )

    def _live(self, run: RankRun) -> set[str]:
        layers = {name for name, each in run.placing.placed.items() if any(use.call.live for use in each.uses)}
        names = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        return self._record.live_parameters | {name for name in names if name.rpartition(".")[0] in layers}

    def _try(self, choices: Choices) -> _Tried:
        self._tries += 1
        fresh = {
            n: torch.empty_like(each) for n, each in self._inputs.items() if isinstance(each, Tensor) and each.is_meta
        }
        given = {name: (value, Tracked(uncut(value.shape))) for name, value in fresh.items()}
        placing = Placing(self._known, self._sizes, choices, self._tied)
        run = RankRun(self._recorded(choices), placing, given)
        try:
            _run_as_rank(self._model, run, choices, {**self._inputs, **fresh})
        except Misplaced as refused:
            return _Tried(choices, placing, run, refused)
        return _Tried(choices, placing, run, None)

    def _recorded(self, choices: Choices) -> WholeRun:
        """An argument that is cut has no values in the whole run either."""
        key = frozenset((pattern, each.argument) for pattern, some in choices.slices.items() for each in some)
        if key not in self._records:
            self._records[key] = recorded(self._model, self._known, self._inputs, choices.slices)[0]
        return self._records[key]

    def _changes(self, tried: _Tried, refused: Misplaced) -> Iterator[Choices]:
        """Changes that may make the refused operation correct with the current layouts."""
        yield from self._summed(tried, refused)
        for maker in self._cut_makers(tried, refused):
            yield from self._numbers(tried, refused, maker)
        yield from self._parameters(tried, refused)
        yield from self._slices(tried, refused)

    def _summed(self, tried: _Tried, refused: Misplaced) -> Iterator[Choices]:
        """Each rank uses a replicated tensor differently: then its gradient is summed."""
        names = {pattern_of(name) for name in refused.used} - tried.choices.shared
        if names:
            choices = tried.choices.copy()
            choices.shared |= names
            yield choices

    def _cut_makers(self, tried: _Tried, refused: Misplaced) -> list[str]:
        """Layers with cut outputs that computed what was refused: the last one for each name pattern."""
        placed = tried.placing.placed
        cut = [name for name in placed if name in refused.makers and placed[name].given in ("both", "one")]
        return list({pattern_of(name): name for name in cut}.values())

    def _numbers(self, tried: _Tried, refused: Misplaced, name: str) -> Iterator[Choices]:
        """Sections of the layer's outputs, and numbers of the module, separately and together."""
        placed, module = tried.placing.placed[name], refused.module
        maker: Maker = name, (placed.side, placed.given)
        parts = tried.placing.parts(placed)
        apart = self._taken_apart(tried.choices, name, placed, refused.sections)
        starts = [tried.choices] if apart is None else [tried.choices, apart]
        starts += self._kept(tried.choices if apart is None else apart, name, placed, refused)
        if apart is not None:
            yield apart
        if module is None or parts < 2 or not name.startswith(f"{module}."):
            return
        for choices in starts:
            for stage in (HEADS, WIDTHS) if refused.by_numbers else (HEADS,):
                if (changed := self._patched(choices, module, stage, parts, maker)) is not None:
                    yield changed
        for count in {parts, *(self._sizes[axis] for axis in PLANE)} - {1}:  # each rank has some of a key's queries
            if (changed := self._patched(tried.choices, module, GROUPS, count, maker)) is not None:
                changed.shared |= {pattern_of(maker) for maker in refused.makers}
                yield changed

    def _kept(self, choices: Choices, name: str, placed: Placed, refused: Misplaced) -> list[Choices]:
        """All queries, and one key and one value that all heads share, which are whole on every rank."""
        pattern, linear = pattern_of(name), placed.known
        if not isinstance(linear, Linear) or placed.given != "both" or choices.kept.get(pattern):
            return []
        sections = choices.sections.get(pattern, ())
        if not sections and refused.split is not None and refused.split[0] > 2:
            count, width = refused.split
            sections = ((count - 2) * width, width, width)
        if len(sections) < 2 or sum(sections) != linear.n or sections[0] <= max(sections[1:]):
            return []
        changed = choices.copy()
        changed.sections[pattern], changed.kept[pattern] = sections, tuple(range(1, len(sections)))
        return [changed]

    def _taken_apart(self, choices: Choices, name: str, placed: Placed, sections: tuple[int, ...]) -> Choices | None:
        """Together with what is known about them."""
        if not isinstance(placed.known, Linear) or len(sections) < 2 or sum(sections) != placed.known.n:
            return None
        before = choices.sections.get(pattern_of(name), ())
        ends = sorted({*accumulate(sections), *accumulate(before)})
        found = tuple(right - left for left, right in pairwise([0, *ends]))
        if found == before:
            return None
        changed = choices.copy()
        changed.sections[pattern_of(name)] = found
        return changed

    def _patched(self, choices: Choices, module: str, stage: int, parts: int, maker: Maker) -> Choices | None:
        pattern = pattern_of(module)
        already = choices.patch_of.get(pattern, Patch({}, {}))
        patch = patch_of(self._model.get_submodule(module), stage, parts, already)
        if patch is None:
            return None
        changed = choices.copy()
        changed.patches[pattern] = (*choices.patches.get(pattern, ()), Patched(patch, maker))
        return changed

    def _parameters(self, tried: _Tried, refused: Misplaced) -> Iterator[Choices]:
        """Cut a parameter that is used outside of layers, or a buffer, like the tensor that it meets."""
        names = {name for each in refused.tensors for name in each.parameters}
        held = {**dict(self._model.named_parameters()), **buffers_to_cut(self._model)}
        shapes = {name: each.shape for name, each in held.items() if name in names}
        for name, shape in shapes.items():
            for cutting in _cuttings(refused):
                for place, size in enumerate(shape):
                    cut = CutParameter(place, cutting)
                    fits = size % local_parts(cutting) == 0 and (pattern_of(name), cut) not in tried.choices.dropped
                    if fits and pattern_of(name) not in tried.choices.parameters:
                        choices = tried.choices.copy()
                        choices.parameters[pattern_of(name)] = cut
                        yield choices

    def _slices(self, tried: _Tried, refused: Misplaced) -> Iterator[Choices]:
        """A constant argument of the module is cut like the tensor that it is combined with."""
        if refused.module is None:
            return
        pattern = pattern_of(refused.module)
        dims = {dim for each in refused.tensors for dim in each.dims if _is_cut_by_plane(dim)}
        for argument, lying in refused.arguments.items():
            for place, whole in enumerate(lying):
                for dim in dims:
                    made = Sliced(argument, place, dim)
                    if size_of(dim) == size_of(whole) and (pattern, made) not in tried.choices.dropped:
                        choices = tried.choices.copy()
                        choices.slices[pattern] = (*choices.slices.get(pattern, ()), made)
                        yield choices

    def _less(self, tried: _Tried, refused: Misplaced) -> Choices | None:
        """Of the layers that computed what was refused, the one that is cut most (the last of several) is cut less."""
        placed, choices = tried.placing.placed, tried.choices.copy()
        makers = [name for name in placed if name in refused.makers and placed[name].given != "whole"]
        if makers:
            name = min(reversed(makers), key=lambda maker: placed[maker].level)
            choices.bar(name, (placed[name].side, placed[name].given), refused.why)
            return choices
        if (back := self._taken_back(choices, refused)) is not None:
            return back
        # Code may have read the sizes of its module's arguments, or of any earlier tensor.
        for some in (*refused.around, frozenset(placed)):
            cut = [name for name in placed if name in some and placed[name].given != "whole"]
            if cut:
                choices.bar(cut[-1], (placed[cut[-1]].side, placed[cut[-1]].given), refused.why)
                return choices
        return None

    def _taken_back(self, choices: Choices, refused: Misplaced) -> Choices | None:
        """A choice for one layer does not fit what is whole: revoke it."""
        for name in {name for each in refused.tensors for name in each.parameters}:
            cut = choices.parameters.pop(pattern_of(name), None)
            if cut is not None:
                choices.dropped.add((pattern_of(name), cut))
                return choices
        if slices := choices.slices.pop(pattern_of(refused.module or ""), ()):
            choices.dropped |= {(pattern_of(refused.module or ""), made) for made in slices}
            return choices
        pattern = pattern_of(refused.module or "")
        if refused.module is None:
            pattern = next((each for each in reversed(choices.patches) if choices.patches[each]), "")
        if choices.patches.get(pattern):
            (*kept, last) = choices.patches[pattern]
            choices.patches[pattern] = tuple(kept)
            choices.bar(*last.maker, refused.why)
            return choices
        return None


def _cuttings(refused: Misplaced) -> set[Cutting]:
    """How axes of the plane cut what was refused."""
    found = {factor.cutting for each in refused.tensors for dim in each.dims for factor in dim}
    return {cutting for cutting in found if cutting and all(axis in PLANE for axis, _ in cutting)}


def _is_cut_by_plane(dim: Dim) -> bool:
    return any(axis in PLANE for factor in dim for axis, _ in factor.cutting)


def local_parts(cutting: Cutting) -> int:
    return Factor(1, cutting).parts


def _run_as_rank(model: nn.Module, run: RankRun, choices: Choices, inputs: Mapping[str, Any]) -> None:
    with patched(model, choices.patch_of):
        run.finish(run_with(run, inputs))


# Observes a run. It gets a function that returns a tensor's layout, and the rank's number of samples.
Watch = Callable[[Callable[[Tensor], Tracked], int], AbstractContextManager[None]]


@dataclass(frozen=True)
class Samples:
    """Runs on a part of the `count` samples of an example, with the layouts that were found for the whole."""

    model: nn.Module
    known: Mapping[str, Known]
    sizes: Mapping[str, int]
    inputs: Mapping[str, Any]
    tied: Mapping[str, str]
    found: Found
    count: int

    def cut(self) -> str | None:
        """Run a rank's part. If the model computes something else for it than within all samples, say what.

        Afterwards the layers know whose number of rows does not depend on the number of samples.
        """
        try:
            run = self.part()
        except CutError as error:
            self._compare_rows()
            return str(error)
        self.found.outputs, self.found.averaged = run.outputs, frozenset(run.averaged_outputs)
        self.found.losses += [LossUse(None, 1, 0, 0.0)] * len(self.found.averaged)
        for name, each in run.placing.placed.items():
            for use, here in zip(self.found.placed[name].uses, each.uses, strict=True):
                use.fixed = here.fixed
        return None

    def part(self, watch: Watch | None = None) -> RankRun:
        """The run of a rank's part. Raises CutError if the model computes something else for it than within all."""
        parts = next(each for each in range(2, self.count + 1) if self.count % each == 0)
        empty = {name: each.to("meta") if isinstance(each, Tensor) else each for name, each in self.inputs.items()}
        given = _parts_of_samples(empty, self.count, parts)
        own = {name: tensor for name, (tensor, _) in given.items()}
        run = self._rank_run(empty, given)
        with nullcontext() if watch is None else watch(run.lies, self.count // parts):
            _run_as_rank(self.model, run, self.found.choices, {**empty, **own})
        return run

    def _rank_run(self, inputs: Mapping[str, Any], given: dict[str, tuple[Tensor, Tracked]]) -> RankRun:
        placing = Placing(self.known, self.sizes, self.found.choices, self.tied)
        record, _ = recorded(self.model, self.known, inputs, self.found.choices.slices)
        return RankRun(record, placing, given)

    def _compare_rows(self) -> None:
        """If samples cannot be cut: run half of them as a whole example, and compare each layer's number of rows."""
        half = {
            name: each[: self.count // 2]
            if isinstance(each, Tensor) and each.dim() and len(each) == self.count
            else each
            for name, each in self.inputs.items()
        }
        with suppress(CutError):  # it does not run on half of them
            run = self._rank_run(half, {})
            _run_as_rank(self.model, run, self.found.choices, half)
            for name, each in run.placing.placed.items():
                uses = self.found.placed[name].uses
                if len(uses) == len(each.uses):
                    for use, here in zip(uses, each.uses, strict=True):
                        use.fixed = use.call.rows_in == here.call.rows_in


def _parts_of_samples(inputs: Mapping[str, Any], samples: int, parts: int) -> dict[str, tuple[Tensor, Tracked]]:
    given: dict[str, tuple[Tensor, Tracked]] = {}
    for name, each in inputs.items():
        if isinstance(each, Tensor):
            cut = each.dim() > 0 and each.shape[0] == samples
            dims = ((Factor(samples, (("data", parts),)),), *uncut(each.shape[1:])) if cut else uncut(each.shape)
            given[name] = torch.empty(local_shape(dims), dtype=each.dtype, device=META), Tracked(dims)
    return given
