"""A stage of a model that does not list its pieces: the model's own forward, in which only the stage's modules run.

Modules of earlier stages return the tensors that they returned there, if these were sent; otherwise zeros, which
nothing uses. The first module of a later stage ends the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.parallel import CubeState
from cubeloom.parallel.layers.loss import share_of
from cubeloom.parallel.traced import Row
from cubeloom.parallel.traced.row import Made, Same, Source, entry_name
from cubeloom.parallel.weave import split, strand
from cubeloom.pipeline.runtime.channels import Boundary, Shape
from cubeloom.pipeline.runtime.microbatches import PORTION
from cubeloom.pipeline.runtime.stage import Carry, Data


class _Left(BaseException):
    """Raised when a module of a later stage is called. Not an Exception, so that a model's own code does not catch it."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.given = args, kwargs


@dataclass
class _Run:
    """One forward in progress. `counting`: no module runs."""

    carry: Carry
    counting: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    made: Carry = field(default_factory=dict)


class RowStage:
    """`before`: shapes of the outputs of earlier stages' modules. After a run, `seen` also has those of this stage."""

    def __init__(self, model: nn.Module, row: Row, pieces: range, state: CubeState, ways: int = 1) -> None:
        self._model, self._row, self._state, self._ways = model, row, state, ways
        self._first, self._stop = row.pieces[pieces[0]].start, row.pieces[pieces[-1]].stop
        self._ends = pieces.stop == len(row.pieces)
        last = pieces[-1]
        self._wanted = [] if self._ends else row.used_after(last)
        self._left = [] if self._ends else row.enters(last)
        self._entered = row.enters(pieces[0] - 1) if pieces[0] else []
        self.alike = alike_between(row, pieces)
        self._numbers: dict[str, list[int]] = {}
        self._runs: dict[object, _Run] = {}
        self.before: Boundary = {}
        self.seen: Boundary = {}
        for number, call in enumerate(row.calls):
            self._numbers.setdefault(call.unit, []).append(number)
        for unit in self._numbers:
            module = model.get_submodule(unit)
            module.forward = partial(self._called, unit, module.forward)

    def run(self, carry: Carry, data: Data) -> Carry:
        run = _Run(carry)
        try:
            result = self._forward(run, data)
        except _Left as left:
            return self._handed(run, left)
        if not self._ends:
            raise self._other_code()
        return {"loss": share_of(result, self._state.shares.get(PORTION))}

    def count(self, data: Data) -> Tensor | None:
        """The number of targets of each cross-entropy in the model's forward, in order."""
        counts = [each for part in split(dict(data), self._ways) if (each := self._counted(part))]
        return torch.stack([torch.stack(each) for each in counts]).sum(0) if counts else None

    def _counted(self, data: Data) -> list[Tensor]:
        counts: list[Tensor] = []
        self._state.counting = counts
        try:
            with torch.no_grad():
                self._forward(_Run({}, counting=True), data)
        finally:
            self._state.counting = None
        return counts

    def _forward(self, run: _Run, data: Data) -> Tensor:
        here = strand()
        self._runs[here] = run
        try:
            result: Tensor = self._model(**data)
        finally:
            del self._runs[here]
        return result

    def _called(self, unit: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._runs.get(strand())
        if run is None:
            raise UserError(f"{unit} is called outside of its pipeline: call the pipeline's step")
        number = self._number(unit, run)
        if number < self._first or run.counting:
            return self._skipped(number, run, args, kwargs)
        if number >= self._stop:
            raise _Left(args, kwargs)
        if number == self._first and self._entered:
            args, kwargs = self._given((args, kwargs), run)
        output = plain(*args, **kwargs)
        self._keep(number, run, output)
        return output

    def _number(self, unit: str, run: _Run) -> int:
        numbers, count = self._numbers[unit], run.calls[unit]
        run.calls[unit] += 1
        if count == len(numbers):
            raise self._other_code()
        return numbers[count]

    def _other_code(self) -> UserError:
        return UserError(
            f"{type(self._model).__name__} calls other modules now than when its row of blocks was looked for: what its forward"
            " calls may not depend on values"
        )

    def _given(self, given: Any, run: _Run) -> Any:
        """Arguments, with received tensors in their places."""
        place = iter(range(len(torch_private.tree_leaves(given))))

        def carried(value: Any) -> Any:
            leaf = next(place)
            return torch_private.same_values(run.carry[entry_name(leaf)]) if leaf in self._entered else value

        return torch_private.tree_map(carried, given)

    def _skipped(self, number: int, run: _Run, args: Any, kwargs: Any) -> Any:
        given = torch_private.tree_leaves((args, kwargs))

        def put(value: Any) -> Any:
            if isinstance(value, Same):
                return given[value.leaf]
            if not isinstance(value, Made):
                return value
            name = self._row.name_of((number, value.leaf))
            if name in run.carry:
                return torch_private.same_values(run.carry[name])
            shape = (self.seen if run.counting else self.before)[name]
            return torch.zeros(shape.size, dtype=shape.dtype, device=self._state.network.device)

        return torch_private.tree_map(put, self._row.calls[number].gives)

    def _keep(self, number: int, run: _Run, output: Any) -> None:
        call = self._row.calls[number]
        for leaf, value in enumerate(torch_private.tree_leaves(output)):
            if leaf not in call.made:
                continue
            source: Source = (number, leaf)
            name = self._row.name_of(source)
            if name not in self.seen:
                self.seen[name] = Shape.of(value)
            if source in self._wanted:
                run.made[name] = value.clone() if call.made[leaf].changed else value

    def _handed(self, run: _Run, left: _Left) -> Carry:
        given = torch_private.tree_leaves(left.given)
        passed_on = {entry_name(leaf): given[leaf] for leaf in self._left}
        for source in self._wanted:
            name = self._row.name_of(source)
            found = run.made.get(name, run.carry.get(name))
            if found is None:
                raise self._other_code()
            passed_on[name] = found
        return passed_on

    def told(self, before: Mapping[str, Shape]) -> None:
        self.before = dict(before)
        self.seen = dict(before)


def alike_between(row: Row, pieces: range) -> frozenset[str]:
    """Of what a stage with these pieces is given and hands on: what is the same for any samples."""
    ends = [piece for piece in (pieces.start - 1, pieces.stop - 1) if 0 <= piece < len(row.pieces) - 1]
    passed_on = [row.block_outputs(piece) for piece in ends]
    return frozenset(name for some in passed_on for name, each in some.items() if not each.of_samples)


def leave_out(
    model: nn.Module,
    row: Row,
    kept: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    like: Tensor,
    device: torch.device,
) -> None:
    """Replace parameters of other stages by zeros without memory, because code may read their shape.

    `shapes`: of one rank's parts, for parameters that code outside of layers uses.
    """
    owners = {name.removesuffix(".") for names in row.modules for name in names if name.endswith(".")}
    whole = [unit for unit in row.units if unit not in kept]
    modules = [module for unit in whole for module in model.get_submodule(unit).modules()]
    modules += [model.get_submodule(owner) for owner in owners if f"{owner}." not in kept]
    names = {id(module): name for name, module in model.named_modules()}
    for module in modules:
        own = torch_private.parameters_of(module)
        for kind, each in own.items():
            if each is not None:
                dtype = like.dtype if each.is_floating_point() else each.dtype
                shape = shapes.get(f"{names[id(module)]}.{kind}", each.shape)
                zeros = torch.zeros((), dtype=dtype, device=device).expand(shape)
                own[kind] = nn.Parameter(zeros, requires_grad=False)
        buffers = torch_private.buffers_of(module)
        buffers.update(
            {
                kind: torch.zeros((), dtype=each.dtype, device=device).expand(each.shape)
                for kind, each in buffers.items()
                if each is not None and each.is_meta
            }
        )
