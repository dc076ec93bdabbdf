"""The rank's run: follows the record of the whole run with local sizes, and knows the layout of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.errors import first_line
from cubeloom.base.operations import Operation
from cubeloom.parallel.check import along, indexing, pointwise, products, views
from cubeloom.parallel.check.functions import Function as AutogradFunction
from cubeloom.parallel.check.gradient import summands
from cubeloom.parallel.check.record import Entry, Record
from cubeloom.parallel.check.results import tensors_in
from cubeloom.parallel.check.run import META, Function, Run, detached_results, leaves
from cubeloom.parallel.check.step import Refused, Rule, Shape, Step
from cubeloom.parallel.check.tracked import Dims, Tracked, described, is_cut, local_shape, uncut

RULES: dict[str, Rule] = {**pointwise.RULES, **views.RULES, **along.RULES, **products.RULES, **indexing.RULES}
# From the layer's name, its inputs, whether these need gradients, and its output's shape, to the output's layout.
LayerRule = Callable[[str, Sequence[Tracked], Sequence[bool], Shape], Tracked]


class Replay(Run):
    averaged = False  # as in Step

    def __init__(self, record: Record, layer_rule: LayerRule, inputs: Mapping[str, tuple[Tensor, Tracked]]) -> None:
        super().__init__(record.model, record.layers)
        self._record = record
        self._layer_rule = layer_rule
        self._place = 0
        self._kept: dict[int, tuple[Any, Tensor]] = {}
        self._tracked: dict[int, Tracked] = {}
        self.outside = record.outside
        for name, (tensor, tracked) in inputs.items():
            self._keep(tensor, ("input", name), tracked)

    def of(self, tensor: Tensor) -> Tracked:
        """The layout of a tensor. A tensor from before the run is whole on every rank."""
        if id(tensor) not in self._tracked:
            known = self._record.before.get(id(tensor))
            if known is None or known[1] is not tensor:
                raise Refused(
                    f"a tensor of shape {list(tensor.shape)} comes from code that is not seen, or was kept from an earlier call"
                )
            self._keep(tensor, known[0], Tracked(uncut(tensor.shape)))
        return self._tracked[id(tensor)]

    def seen(self) -> Iterable[Tensor]:
        return [tensor for _, tensor in self._kept.values()]

    def gradient_like(self, output: Tensor) -> Tensor:
        gradient = torch.empty_like(output, requires_grad=False)
        tracked = self.of(output)
        self._keep(gradient, ("gradient", self._kept[id(output)][0]), Tracked(tracked.dims, makers=tracked.makers))
        return gradient

    def same_as(self, output: Tensor, given: Tensor) -> None:
        tracked = self.of(given)
        self._keep(output, self._kept[id(given)][0], tracked)

    def function(self, function: AutogradFunction) -> Sequence[Any]:
        gradients = super().function(function)
        for given, gradient in zip(function.inputs, gradients, strict=True):
            if given is None or not isinstance(gradient, Tensor):
                continue
            needed, found = self.of(self._on_meta(given)), self.of(gradient)
            if needed.dims != found.dims:
                self.refuse(
                    f"the backward of {function.name} gives {found} as the gradient of {needed}: it must lie as that does"
                )
        return gradients

    def _keep(self, tensor: Tensor, known: Any, tracked: Tracked) -> None:
        self._kept[id(tensor)] = known, tensor
        self._tracked[id(tensor)] = tracked

    def _next(self, name: str, tensors: Sequence[Tensor]) -> tuple[Entry, list[Tracked]]:
        """The same operation of the whole run, and the layouts of its tensors."""
        if self._place == len(self._record.entries) or self._record.entries[self._place].name != name:
            self._refuse_other_code(name)
        entry = self._record.entries[self._place]
        inputs = list(map(self.of, tensors))
        if tuple(self._kept[id(tensor)][0] for tensor in tensors) != entry.inputs:
            self._refuse_other_code(name)
        self._place += 1
        return entry, inputs

    def _refuse_other_code(self, name: str) -> None:
        ends = self._place == len(self._record.entries)
        theirs = "the end" if ends else self._record.entries[self._place].name
        what = (
            f"{name} comes where {theirs} comes in the serial model" if name != theirs else f"{name} has other operands"
        )
        raise Refused(
            f"the model runs other code on parts than on the whole: {what}. It may not depend on the sizes of parts"
        )

    def step(
        self,
        operation: Operation,
        function: Function,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        numbers: list[Any],
    ) -> Any:
        try:
            return self._step(operation, function, args, kwargs, tensors, numbers)
        except Refused as refused:
            self.refuse(str(refused))

    def _step(
        self,
        operation: Operation,
        function: Function,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        numbers: list[Any],
    ) -> Any:
        before = [tensor.requires_grad for tensor in tensors]
        result, error = None, None
        results = list[Tensor]()
        try:
            result = detached_results(function(*args, **kwargs), tensors, operation.in_place)
        except Exception as failed:  # torch refuses the local sizes; the rule may know why
            error = failed
        else:
            leaves(result, results, [])
            if operation.name == "setitem":
                results = tensors[:1]
            if not results and not tensors:
                return result
        entry, inputs = self._next(operation.name, tensors)
        local = None if error is not None else [tuple(each.shape) for each in results]
        step = Step(
            operation.name,
            args,
            kwargs,
            inputs,
            before,
            self.of,
            entry.numbers,
            numbers,
            entry.shapes,
            local,
            self.averaged,
        )
        found = ruled(step)
        if error is not None:
            given = " and ".join(map(str, inputs))
            raise Refused(f"{operation.name} of {given} fails on the parts of a rank: {first_line(error)}")
        check_results(step, found)
        self._keep_results(step, operation, results, found)
        return iter(results) if operation.iterates else result

    def _keep_results(self, step: Step, operation: Operation, results: Sequence[Tensor], found: Sequence[Dims]) -> None:
        flows = any(result.requires_grad for result in results)
        makers = frozenset(name for each in step.inputs if not each.plain for name in each.makers)
        for number, (result, dims) in enumerate(zip(results, found, strict=True)):
            own, parameters = self._summands(step, dims) if flows else (frozenset[str](), frozenset[str]())
            tracked = Tracked(dims, own, makers, parameters)
            if operation.in_place:
                old = self._tracked[id(result)]
                if (old.dims, old.summands) != (tracked.dims, tracked.summands):
                    raise Refused(
                        f"{step.name} changes {old} in its place into {tracked}: make a new tensor, or begin with one that is"
                        " cut so, as torch.zeros_like makes it"
                    )
            self._keep(result, (self._place - 1, number), tracked)

    def _summands(self, step: Step, dims: Dims) -> tuple[frozenset[str], frozenset[str]]:
        """Axes along which ranks have partial gradients of the result, and the parameters if it is made of those alone."""
        return summands(step.name, list(zip(step.inputs, step.needs_gradient, strict=True)), dims), frozenset()

    def layer(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        tensors, numbers = list[Tensor](), list[Any]()
        with self.paused():
            leaves((args, kwargs), tensors, numbers)
        try:
            entry, inputs = self._next(f"layer {name}", tensors)
            needed = [tensor.requires_grad for tensor in tensors]
            step = Step(
                f"layer {name}", args, kwargs, inputs, needed, self.of, entry.numbers, numbers, entry.shapes, None
            )
            step.refuse_other_numbers()
            tracked = self._layer_rule(name, inputs, needed, entry.shapes[0])
        except Refused as refused:
            self.refuse(str(refused))
        with self.paused():
            output = torch.empty(local_shape(tracked.dims), dtype=entry.dtype, device=META)
            if entry.needs_gradient:
                output = output.requires_grad_().clone()  # not a leaf, so that it can be changed in place
        self._keep(output, (self._place - 1, 0), tracked)
        return output

    def finish(self, result: Any) -> dict[str, Tracked]:
        """Check the model's result: whole, or a part, with its whole gradient. Gives the layouts of its tensors, by path."""
        found: dict[str, Tracked] = {}
        try:
            if self._place < len(self._record.entries):
                self._refuse_other_code("the end")
            for path, output in tensors_in(result):
                tracked = found[path] = self.of(output)
                if tracked.summands and output.requires_grad:
                    axes = "·".join(sorted(tracked.summands))
                    raise Refused(
                        f"the model gives {tracked}, of whose gradient each rank of {axes} would have a summand and all"
                        " compute the whole: a CopyToRegion() is used by layers that are ColwiseFromReplicated() alone"
                    )
        except Refused as refused:
            self.refuse(str(refused))
        return found


def ruled(step: Step) -> list[Dims]:
    """How the results of an operation lie. On tensors that nothing cuts anything goes."""
    nothing_cut = not any(is_cut(dim) for tracked in step.inputs for dim in tracked.dims)
    if nothing_cut and step.local == step.whole and step.same_numbers:
        return [uncut(shape) for shape in step.whole]
    rule = RULES.get(step.name)
    if rule is not None:
        if "input" in step.kwargs and next(iter(step.kwargs)) != "input":
            raise Refused(f"{step.name} is given its input behind other arguments, whose places are then not known")
        return rule(step)
    cut = next((str(tracked) for tracked in step.inputs if not tracked.plain), "")
    if not cut:
        step.refuse_other_numbers()
        raise Refused(f"{step.name} makes {step.local} on a rank and {step.whole} in the serial model")
    raise Refused(f"{step.name} of {cut} has no rule: whether a rank can compute it of its part is not known")


def check_results(step: Step, found: Sequence[Dims]) -> None:
    """Local sizes are those of the layout, and no axis cuts two dimensions."""
    for dims, local in zip(found, step.local or [], strict=True):
        if local_shape(dims) != local:
            given = " and ".join(map(str, step.inputs)) or "numbers"
            raise Refused(
                f"{step.name} of {given} makes {list(local)} on a rank, where its part of the serial model's is"
                f" {list(local_shape(dims))}, {described(dims)}"
            )
        axes = [axis for dim in dims for factor in dim for axis, _ in factor.cutting]
        twice = next((axis for axis in axes if axes.count(axis) > 1), None)
        if twice is not None:
            raise Refused(
                f"{step.name} of {' and '.join(map(str, step.inputs))} joins two dimensions that {twice} cuts: a rank would"
                " have its own part with its own part only, and none of it with that of another"
            )


def replayed(
    record: Record,
    layer_rule: LayerRule,
    tensors: Mapping[str, tuple[Tensor, Tracked]],
    others: Mapping[str, Any],
) -> dict[str, Tracked]:
    """Run the model as one rank does. Raises CutError where the rank would compute something else.

    Gives the layouts of what the model gives, by path.
    """
    run = Replay(record, layer_rule, tensors)
    return run.finish(run.run({**{name: tensor for name, (tensor, _) in tensors.items()}, **others}))
