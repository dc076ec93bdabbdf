"""What a rank has a part of that no layer makes: parameters and buffers that are chosen to be cut, arguments, constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.operations import Operation
from cubeloom.parallel.check.replay import LayerRule, Replay
from cubeloom.parallel.check.run import META, Function
from cubeloom.parallel.check.step import Refused, Step
from cubeloom.parallel.check.tracked import Dim, Dims, Factor, Tracked, in_sections, local_shape, uncut
from cubeloom.parallel.cut import pattern_of
from cubeloom.parallel.traced.choices import Choices, Sliced
from cubeloom.parallel.traced.constants import RunWithConstants
from cubeloom.parallel.traced.whole_run import WholeRun


def buffers_to_cut(model: nn.Module) -> dict[str, Tensor]:
    """Those that are computed and not stored: checkpoints have whole ones."""
    stored = model.state_dict().keys()
    return {name: each for name, each in model.named_buffers() if name not in stored and each.is_floating_point()}


class RunOfParts(RunWithConstants, Replay):
    def __init__(
        self, record: WholeRun, rule: LayerRule, choices: Choices, inputs: Mapping[str, tuple[Tensor, Tracked]]
    ) -> None:
        super().__init__(record, rule, inputs)
        self._whole, self._choices, self.slices = record, choices, choices.slices
        self._parts: dict[int, Tensor] = {}  # by the id of what is cut, a rank's part of it
        self._buffers = {id(each): name for name, each in buffers_to_cut(self.model).items()}

    def of(self, tensor: Tensor) -> Tracked:
        if id(tensor) in self._tracked:
            return self._tracked[id(tensor)]
        if (constant := self.known_constant(tensor)) is not None:
            self._keep(tensor, constant, Tracked(self._dims_of_constant(constant[1], self.twins[id(tensor)])))
        tracked = super().of(tensor)
        name = self.name_of(tensor) or self._buffers.get(id(self.twins.get(id(tensor), tensor)))
        if name is not None:
            tracked = self._tracked[id(tensor)] = Tracked(tracked.dims, parameters=frozenset({name}))
        return tracked

    def __torch_function__(self, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._choices.parameters and not self._paused:
            args, kwargs = torch_private.tree_map(self._own_part, (args, kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    def _own_part(self, value: Any) -> Any:
        """Of what is chosen to be cut, what a rank has."""
        name = self.owners.get(id(value)) or self._buffers.get(id(value))
        cut = None if name is None else self._choices.parameters.get(pattern_of(name))
        if name is None or cut is None:
            return value
        twin = self._whole.outside.get(id(value), (value, value))[1]
        if id(twin) not in self._whole.kept:  # only layers use it
            return value
        if id(value) not in self._parts:
            dims = list(uncut(value.shape))
            dims[cut.place] = in_sections([value.shape[cut.place]], cut.cutting)
            with self.paused():
                part = torch.empty(local_shape(tuple(dims)), dtype=value.dtype, device=META)
                self._parts[id(value)] = part.requires_grad_(value.requires_grad)
            self._keep(part, self._whole.kept[id(twin)][0], Tracked(tuple(dims), parameters=frozenset({name})))
        return self._parts[id(value)]

    def _keep_results(self, step: Step, operation: Operation, results: Sequence[Tensor], found: Sequence[Dims]) -> None:
        """What is computed of a buffer alone is cut as the buffer is."""
        super()._keep_results(step, operation, results, found)
        own = frozenset(name for each in step.inputs for name in each.parameters) & frozenset(self._buffers.values())
        for result in results if own else ():
            if not result.requires_grad:
                tracked = self._tracked[id(result)]
                self._tracked[id(result)] = replace(tracked, parameters=tracked.parameters | own)

    def sliced(self, name: str, each: Sliced, whole: Tensor) -> Tensor:
        with self.paused():
            lying = self.of(self._on_meta(whole)).dims
        dims, (first, *rest) = lying, each.dim
        times = whole.shape[each.place] // prod(factor.size for factor in rest)
        if not first.cutting and 0 < times < first.size:  # once for each sample, of which this rank has some
            first = Factor(first.size, (), first.size // times)
        dims = (*dims[: each.place], (first, *rest), *dims[each.place + 1 :])
        with self.paused():
            part = torch.empty(local_shape(dims), dtype=whole.dtype, device=META)
        self._keep(part, ("argument", name, each.argument), Tracked(dims))
        return part

    def _dims_of_constant(self, number: int, own: Tensor) -> Dims:
        """One that is made of the size of a rank's samples is alike along them, or it is something else."""
        whole = next((tensor for place, tensor in self._whole.constants.values() if place == number), own)
        if whole.shape == own.shape:
            return uncut(own.shape)
        dims: list[Dim] = []
        for size, local in zip(whole.shape, own.shape, strict=True):
            if local == 0 or size % local:
                raise Refused(
                    f"a tensor of {list(own.shape)} is made on a rank, and of {list(whole.shape)} in the serial model"
                )
            dims.append((Factor(size, (), size // local),) if size != local else uncut([size])[0])
        times = [size // local for size, local in zip(whole.shape, own.shape, strict=True)]
        with self.paused():
            alike = torch.equal(own.repeat(times), whole)
        if not alike:
            raise Refused(f"a tensor of {list(whole.shape)} is made that is not alike for all samples")
        return tuple(dims)
