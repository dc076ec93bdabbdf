"""The run of a traced model as one rank: follows the whole run until an operation would compute something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NoReturn

from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.operations import Operation, is_random
from cubeloom.parallel.check import pointwise, where
from cubeloom.parallel.check.functions import Function as AutogradFunction
from cubeloom.parallel.check.gradient import summands
from cubeloom.parallel.check.results import output_of, tensors_in
from cubeloom.parallel.check.run import Function, leaves
from cubeloom.parallel.check.step import Refused, Step
from cubeloom.parallel.check.tracked import (
    Dims,
    Factor,
    Tracked,
    common,
    is_cut,
    normal,
    uncut,
)
from cubeloom.parallel.cut import CutError, pattern_of
from cubeloom.parallel.outputs import Output
from cubeloom.parallel.traced.loss import MEANS
from cubeloom.parallel.traced.misplaced import REPEATS, LossUse, Misplaced, repeated, sections_of, split_of
from cubeloom.parallel.traced.parts import RunOfParts
from cubeloom.parallel.traced.placing import PLANE, Placing, kept_along, of_plane, samples_cut
from cubeloom.parallel.traced.whole_run import WholeRun

# Operations allowed on logits that are not gathered: they leave the classes in place.
_LAZY = {
    "float",
    "double",
    "to",
    "contiguous",
    "view",
    "reshape",
    "flatten",
    "getitem",
    "clone",
    "type_as",
    "bfloat16",
    "half",
}
LOSSES = ("cross_entropy",)  # that are computed from cut logits
_MEANS = {*LOSSES, "nll_loss", *(function.__name__ for function in MEANS)}
_TAKES_SIZES = {"view", "reshape", "unflatten", "split", "chunk", "getitem", "expand", "narrow", "repeat"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "scaled_dot_product_attention"}


class RankRun(RunOfParts):
    """As one rank runs the model, with what was chosen so far."""

    def __init__(self, record: WholeRun, placing: Placing, inputs: Mapping[str, tuple[Tensor, Tracked]]) -> None:
        super().__init__(record, placing, placing.choices, inputs)
        self.placing = placing
        self._lazy: dict[int, str] = {}
        self._averaged: set[int] = set()
        self._own_means: set[int] = set()  # of them, those that are the mean of a rank's own samples still
        self.outputs: dict[str, Output] = {}
        self.averaged_outputs: set[str] = set()
        self._rows_cut = self.averaged = any(tracked.axes for _, tracked in inputs.values())
        self.losses: list[LossUse] = []
        self.flops = [0.0, 0.0]  # of matmuls between layers: of the whole, and of a rank
        self.partial: dict[
            str, frozenset[str]
        ] = {}  # for parameters used between layers: axes whose ranks have partial gradients

    @property
    def reached(self) -> int:
        """The number of correct operations so far."""
        return self._place

    def lies(self, tensor: Tensor) -> Tracked:
        """As `of`, also for a tensor created from constants."""
        if id(tensor) in self.constants:
            with self.paused():
                return Tracked(self._dims_of_constant(self.constants[id(tensor)][0], tensor))
        return self.of(tensor)

    def step(
        self,
        operation: Operation,
        function: Function,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        numbers: list[Any],
    ) -> Any:
        self._operation = operation.name
        if is_random(operation, args, kwargs):
            self.refuse_random(operation.name)
        try:
            if operation.name in ("setitem", "copy") and len(tensors) > 1:
                self._specialise(*tensors[:2])
            lazy = self._lazy_input(operation, tensors)
            averaged = self._averaged_input(operation, tensors)
            own_mean = any(id(each) in self._own_means for each in tensors)
            if self._is_mean(operation, args, kwargs, tensors):
                averaged, own_mean = True, operation.name == "mean"
                result = self._mean(operation, function, args, kwargs, tensors)
            else:
                result = self._step(operation, function, args, kwargs, tensors, numbers)
            if averaged and isinstance(result, Tensor):
                self._averaged.add(id(result))
                self._own_means |= {id(result)} if own_mean else set()
            self._count_flops(operation.name, tensors, result)
        except Refused as refused:
            self._misplaced(refused, tensors)
        if operation.name in _MEANS and kwargs.get("reduction", "mean") == "mean":
            smoothing = float(kwargs.get("label_smoothing", 0.0))
            rows = tensors[0].numel() // max(1, tensors[0].shape[-1])
            self.losses.append(LossUse(lazy, rows, tensors[0].element_size(), smoothing))
        elif lazy is not None and isinstance(result, Tensor):
            if result.shape[-1:] != tensors[0].shape[-1:]:
                self._misplaced(Refused(f"{operation.name} changes classes"), tensors)
            self._lazy[id(result)] = lazy
        return result

    def _count_flops(self, name: str, tensors: list[Tensor], result: Any) -> None:
        if name not in _PRODUCTS or not isinstance(result, Tensor):
            return
        entry = self._record.entries[self._place - 1]
        own = [tuple(tensor.shape) for tensor in tensors]
        for place, shapes, out in ((0, entry.input_shapes, entry.shapes[0]), (1, own, tuple(result.shape))):
            if name == "scaled_dot_product_attention":
                self.flops[place] += 4.0 * prod(shapes[0]) * shapes[1][-2]
            else:
                self.flops[place] += 2.0 * prod(out) * shapes[name == "baddbmm"][-1]

    def _specialise(self, tensor: Tensor, value: Tensor) -> None:
        """A constant of zeros with the size of a rank's samples becomes what is assigned to it."""
        old, new = self.of(tensor), self.of(value)
        if (
            old.dims
            and new.dims
            and any(factor.ratio > 1 for factor in old.dims[0])
            and common(old.dims[0], new.dims[0])
        ):
            self._tracked[id(tensor)] = replace(old, dims=(new.dims[0], *old.dims[1:]))

    def _is_mean(self, operation: Operation, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
        """Whether it is the mean over all samples. Each rank has as many samples, so its own mean is its part of the
        whole.
        """
        if not self._rows_cut or not any(samples_cut(self.of(each)) for each in tensors):
            return False
        if operation.name in (*LOSSES, *pointwise.LOSSES, "nll_loss"):
            return kwargs.get("reduction", "mean") == "mean"
        return operation.name == "mean" and len(args) == 1 and not kwargs.get("dim")

    def _mean(self, operation: Operation, function: Function, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if any(axis in PLANE for each in tensors for axis in self.of(each).axes):
            raise Refused(f"{operation.name} of features that are cut")
        result = function(*args, **kwargs)
        self._next(operation.name, tensors)
        self._keep(result, (self._place - 1, 0), Tracked(()))
        return result

    def _averaged_input(self, operation: Operation, tensors: list[Tensor]) -> bool:
        """The mean of a rank's own samples may be scaled and added to other means, and nothing else."""
        averaged = [id(each) in self._averaged for each in tensors]
        if not any(averaged):
            return False
        scaled = operation.name in ("mul", "div") and averaged[0] and sum(averaged) == 1
        if not scaled and operation.name not in (
            "add",
            "sub",
            "neg",
            "to",
            "float",
            "double",
            "detach",
            "clone",
            "view",
        ):
            raise Refused(
                f"{operation.name} of the mean of a rank's own samples is not that of the whole batch's: give the mean"
                " as a result of the model, and compute the rest outside of it"
            )
        return operation.name != "detach"

    def _lazy_input(self, operation: Operation, tensors: list[Tensor]) -> str | None:
        lazy = next((self._lazy[id(each)] for each in tensors if id(each) in self._lazy), None)
        if lazy is None:
            return None
        first = id(tensors[0]) in self._lazy and not any(id(each) in self._lazy for each in tensors[1:])
        if not first or operation.name not in (*_LAZY, *LOSSES):
            raise Refused(f"{operation.name} takes logits")
        return lazy

    def layer(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        with self.paused():
            args, kwargs = torch_private.tree_map(self._on_meta, (args, kwargs))
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if any(id(each) in self._lazy for each in tensors):
            self._misplaced(Refused(f"layer {name} takes logits"), tensors)
        self.placing.live = self._place in self._whole.live
        output = super().layer(name, plain, args, kwargs)
        if self.placing.placed[name].given == "lazy":
            self._lazy[id(output)] = name
        return output

    def refuse(self, text: str, cause: BaseException | None = None) -> Any:
        self._misplaced(Refused(text), self._now)

    _now: Sequence[Tensor] = ()  # the tensors of the current operation
    _operation = ""

    def _next(self, name: str, tensors: Sequence[Tensor]) -> Any:
        self._now = tensors
        while self._place < len(self._record.entries) and self._record.entries[self._place].name != name:
            if not self._repeats_nothing():
                break
        return super()._next(name, tensors)

    def _repeats_nothing(self) -> bool:
        """A rank leaves operations out with which the serial model repeats keys: what they take is what they give."""
        entries = self._record.entries[self._place : self._place + len(REPEATS)]
        times = repeated(entries)
        taken = [tensor for known, tensor in self._kept.values() if times and known == entries[0].inputs[0]]
        if not taken:
            return False
        tracked = self._tracked[id(taken[-1])]
        heads = normal((*tracked.dims[1], Factor(times, (), times)))
        self._place += len(REPEATS)
        lying = replace(tracked, dims=(tracked.dims[0], heads, *tracked.dims[2:]))
        self._keep(taken[-1], (self._place - 1, 0), lying)
        return True

    def _misplaced(self, refused: Refused, tensors: Sequence[Tensor]) -> Any:
        """Describe a refused operation, so that the search can change something."""
        known = [self._tracked[id(each)] for each in tensors if id(each) in self._tracked]
        makers = frozenset(maker for each in known for maker in each.makers) | frozenset(
            self._lazy[id(each)] for each in tensors if id(each) in self._lazy
        )
        by_numbers = self._operation in _TAKES_SIZES
        entry = self._record.entries[self._place - 1] if 0 < self._place <= len(self._record.entries) else None
        raise Misplaced(
            str(refused),
            where.here(self.names),
            self._place,
            makers,
            frozenset(maker for each in refused.used for maker in each.makers),
            where.module_here(self.names),
            sections_of(entry) if entry is not None and tensors else (),
            by_numbers,
            known,
            self._arguments(),
            [self._makers_of(args, kwargs) for _, args, kwargs in reversed(self.running)],
            split_of(entry) if entry is not None else None,
        ) from None

    def failed(self, error: Exception) -> NoReturn:
        """The model's own code refuses the sizes of parts, or numbers that were changed."""
        module = self.running[-1][0] if self.running else None
        around = [self._makers_of(args, kwargs) for _, args, kwargs in reversed(self.running)]
        try:
            super().failed(error)
        except CutError as refused:
            none = frozenset[str]()
            raise Misplaced(str(refused), "", self.reached, none, none, module, (), False, (), {}, around) from error

    def _makers_of(self, args: Any, kwargs: Any) -> frozenset[str]:
        tensors = list[Tensor]()
        leaves((args, kwargs), tensors, [])
        known = [self._tracked[id(each)] for each in tensors if id(each) in self._tracked]
        return frozenset(maker for each in known for maker in each.makers)

    def _arguments(self) -> dict[str | int, Dims]:
        """The running module's arguments that are replicated and have no gradient."""
        if not self.running:
            return {}
        _, args, kwargs = self.running[-1]
        found: dict[str | int, Dims] = {}
        given: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
        for key, each in given:
            value = self._on_meta(each)
            if isinstance(value, Tensor) and not value.requires_grad:
                tracked = self._tracked.get(id(value))
                found[key] = uncut(value.shape) if tracked is None else tracked.dims
        return {key: dims for key, dims in found.items() if not any(map(is_cut, dims))}

    def _summands(self, step: Step, dims: Dims) -> tuple[frozenset[str], frozenset[str]]:
        pairs = list(zip(step.inputs, step.needs_gradient, strict=True))
        sectioned = frozenset(axis for each in step.inputs for axis in kept_along(each))
        if (
            sectioned and not sectioned <= Tracked(dims).axes
        ):  # taken from what every rank has whole and uses differently
            return sectioned - Tracked(dims).axes, frozenset()
        own = frozenset(name for each, needs in pairs if needs for name in each.parameters)
        others = [(each, needs) for each, needs in pairs if not each.parameters or not needs]
        # The gradients of all parameters are averaged over samples; for a parameter that is cut there is nothing to
        # sum.
        cutting = frozenset(axis for dim in dims for factor in dim for axis, _ in factor.cutting if axis in PLANE)
        chosen = {name: self._choices.parameters.get(pattern_of(name)) for name in own}
        differing = {name: cutting - {axis for axis, _ in (cut.cutting if cut else ())} for name, cut in chosen.items()}
        if own and not any(differing.values()) and not any(needs for _, needs in others):
            return frozenset(), own
        for name, axes in differing.items():
            self.note(name, axes)
        plane = partial(of_plane, alike=not self._rows_cut)
        found = summands(step.name, [(plane(each), needs) for each, needs in others], plane(Tracked(dims)).dims)
        return found, frozenset()

    def function(self, function: AutogradFunction) -> Sequence[Any]:
        begin = self._place
        try:
            return super().function(function)
        except Misplaced:
            # Each rank has some of the samples, and the gradient of a parameter is a sum over all of them.
            features_cut = any(axis in PLANE for each in function.outputs for axis in self.of(each).axes)
            if features_cut or not any(isinstance(each, nn.Parameter) for each in function.inputs):
                raise
            self._place = self._whole.backwards[begin]
            return ()

    def note(self, name: str, axes: frozenset[str]) -> None:
        """Ranks of these axes have partial gradients of a whole parameter."""
        if self.partial.setdefault(name, axes) != axes:
            raise Refused(f"{name} is used with tensors that are cut, and with others that are not")

    def finish(self, result: Any) -> dict[str, Tracked]:
        lying: dict[str, Tracked] = {}
        for path, output in tensors_in(result):
            tracked = self._tracked.get(id(output))
            if tracked is None:
                continue
            if any(axis in PLANE for axis in tracked.axes):
                self._misplaced(Refused("the model returns it"), [output])
            lying[path] = tracked
            if id(output) in self._own_means:
                self.averaged_outputs.add(path)
        self.outputs = {path: output_of(tracked, {}) for path, tracked in lying.items()}
        return lying
