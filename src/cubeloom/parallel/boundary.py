"""Where a program calls a model: samples of the batch go in, and what comes out looks whole, as what the program gave does.

A program that gives plain tensors gets plain ones, of whatever these are samples of. Then ranks must have the same loss: where
they differ, it was none of the whole batch, and its backward is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base.errors import UserError
from cubeloom.comm import Axis, Network
from cubeloom.comm.batch import BatchValue, Parts, batch_tensor, part_of
from cubeloom.parallel.check.results import mapped
from cubeloom.parallel.layers.alike import all_parts_of
from cubeloom.parallel.layers.classes import Classes
from cubeloom.parallel.layers.logits import CutLogits
from cubeloom.parallel.outputs import Output, Outputs, Plane


@dataclass(frozen=True)
class Boundary:
    """`raw`: what layers of a cut give to a program that gives plain tensors is this rank's part of the features, too."""

    network: Network
    outputs: Outputs | None  # None: of a model that was not looked at
    raw: bool = False

    def enter(self, given: Any) -> tuple[Any, int | None]:
        """With how many samples this rank has; None where they are plain tensors."""
        samples: set[int] = set()

        def own(path: str, value: Tensor) -> Any:
            if isinstance(value, Parts):
                if value.cut:
                    raise UserError(
                        f"argument {path.partition('.')[2]} of the model has samples in dimension {value.cut}, and must have"
                        " them in dimension 0"
                    )
                samples.add(value.part.shape[0])
            return part_of(value)

        given = mapped(own, given)
        return given, (max(samples) if samples else None)

    def leave(self, result: Any, samples: int | None) -> Any:
        if samples is not None:
            return mapped(lambda path, value: self._looking_whole(path, value, samples), result)
        if not torch.is_grad_enabled() and self.raw:
            return result
        return mapped(self._plain, result)

    def _looking_whole(self, path: str, value: Tensor, samples: int) -> Tensor:
        if not value.dim():
            return value
        output = self._output(path, value, samples)
        whole = self._gathered(value, output)
        return whole if output.samples is None else batch_tensor(whole, output.samples, self.network.samples)

    def _output(self, path: str, value: Tensor, samples: int) -> Output:
        found = None if self.outputs is None else self.outputs.get(path)
        if found is not None and not found.unclear:
            return found
        if found is None and value.shape[0] == samples:
            return Output(0)
        if value.requires_grad:
            raise UserError(
                f"the model gives {path or 'a tensor'}, of shape {list(value.shape)} on this rank, and which of its numbers"
                " are of which sample is not known: it was not among what the model gave for the example. Pass parallelize an"
                " `example` for which the model gives it, with samples as a dimension of its own"
            )
        return Output(None)

    def _gathered(self, value: Tensor, output: Output) -> Tensor:
        """Of features, and of rows that axes of the plane cut further, all parts; classes stay cut until they are needed."""
        for plane in sorted(output.plane, key=lambda each: each.dim == value.dim() - 1):
            axis = self.network.axis(*plane.axes)
            if plane.dim == value.dim() - 1 and len(plane.axes) == 1:
                even = Classes.even(value.shape[-1], axis)
                classes = Classes(plane.count, axis.index * plane.part, plane.part) if plane.count else even
                return CutLogits.of(value, self.network, axis, classes, "output")
            value = _all_of(value, plane, axis)
        return value

    def _plain(self, path: str, value: Tensor) -> Tensor:
        """Of plain inputs: what it is of, only the loss shows."""
        if not value.dim():
            return value
        output = (self.outputs or {}).get(path, Output(None))
        axes: Sequence[str] = ("data", "z")
        if self.raw and (self.outputs is None or output.plane):
            axes = ("data", "z", "x", "y")
        elif not self.raw:
            value = self._gathered(value, output)
        if not value.requires_grad or prod(self.network.grid.size(axis) for axis in axes) == 1:
            return value
        return checked(value, self.network.axis(*axes))


def checked(value: Tensor, axis: Axis) -> Tensor:
    """One of whose losses all ranks must have the same."""
    if isinstance(value, CutLogits):
        value.checked = axis
        return value
    return BatchValue.of(value, axis)


def _all_of(value: Tensor, plane: Plane, axis: Axis) -> Tensor:
    if not plane.count:
        return all_parts_of(value, axis, plane.dim, "output")
    missing = plane.part - value.shape[plane.dim]
    padded = functional.pad(value, (*(0, 0) * (value.dim() - 1 - plane.dim), 0, missing))
    return all_parts_of(padded, axis, plane.dim, "output").narrow(plane.dim, 0, plane.count)


def at_boundary(model: nn.Module, boundary: Boundary) -> None:
    """From now on the model is called by a program."""
    if boundary.network.grid.cube * boundary.network.grid.data == 1:
        return
    kind = type(model)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        (arguments, named), samples = boundary.enter((arguments, named))
        return boundary.leave(kind.forward(self, *arguments, **named), samples)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
