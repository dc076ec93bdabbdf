"""One stage of one replica on its worker: forward, backward, and the two halves of a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cubeloom.parallel import CubeState
from cubeloom.parallel.gradients import DeferredWeightGrads
from cubeloom.parallel.weave import Weave

if TYPE_CHECKING:
    from cubeloom.pipeline.runtime.channels import Boundary
    from cubeloom.pipeline.runtime.row_stage import RowStage

Carry = dict[str, Tensor]
Data = Mapping[str, Tensor]
Run = Callable[[Carry, Data], Carry]
Portion = tuple[int, int | None]  # a micro-batch, or one half of it


@dataclass
class _Flight:
    """A portion between its forward and its weight gradient."""

    inputs: Carry
    outputs: Carry
    noted: DeferredWeightGrads | None = None


@dataclass
class Stage:
    """`runs` are the stage's pieces. Inputs and outputs are detached: each stage has its own autograd graph."""

    runs: Sequence[Run]
    state: CubeState
    ways: int = 1  # strands of a portion
    row: RowStage | None = None  # of a model that does not list its pieces
    _flights: dict[Portion, _Flight] = field(default_factory=dict)

    def forward(self, portion: Portion, inputs: Carry, data: Data) -> Carry:
        leaves = {name: tensor.detach() for name, tensor in inputs.items()}
        for tensor in leaves.values():
            if tensor.is_floating_point():
                tensor.requires_grad_()
        outputs = self._woven(leaves, data)
        self._flights[portion] = _Flight(leaves, outputs)
        return {name: tensor.detach() for name, tensor in outputs.items()}

    def _woven(self, carry: Carry, data: Data) -> Carry:
        """Run in strands of the samples. All get tensors that are alike for all samples; of such outputs the first is sent."""
        alike = frozenset() if self.row is None else self.row.alike
        shared = {name: each for name, each in carry.items() if name in alike}
        found: Carry = {}

        def of_strand(own: Carry, data: Data) -> Carry:
            outputs = self._run({**own, **shared}, data)
            for name in alike.intersection(outputs):
                found.setdefault(name, outputs.pop(name))
            return outputs

        own = {name: each for name, each in carry.items() if name not in alike}
        return Weave(of_strand, self.ways, self.state.staggers)(own, data) | found

    def _run(self, carry: Carry, data: Data) -> Carry:
        for run in self.runs:
            carry = run(carry, data)
        return carry

    def forget(self) -> None:
        """Forget recorded shapes, because others follow."""
        if self.row is not None:
            self.row.seen = {}

    def told(self, before: Boundary) -> None:
        """Take the shapes of the outputs of earlier stages' modules."""
        if self.row is not None:
            self.row.told(before)

    @property
    def seen(self) -> Boundary:
        """These shapes for later stages, after a run."""
        return {} if self.row is None else self.row.seen

    def dry_run(self, inputs: Carry, data: Data) -> Carry:
        """Run the forward to learn the shapes of the outputs."""
        with torch.no_grad():
            return self._woven(inputs, data)

    def backward(self, portion: Portion, gradients: Carry) -> Carry:
        """Compute both gradients; return those of the inputs."""
        flight = self._flights.pop(portion)
        return self._input_gradients(flight, gradients)

    def input_grad(self, portion: Portion, gradients: Carry) -> Carry:
        """The gradients of the inputs; the weight gradients are deferred."""
        flight = self._flights[portion]
        with self.state.gradients.defer_weight_grads() as noted:
            found = self._input_gradients(flight, gradients)
        # The deferred weight gradients keep their operands; the graph and the other activations are freed now.
        self._flights[portion] = _Flight({}, {}, noted)
        return found

    def weight_grad(self, portion: Portion) -> None:
        """Compute the weight gradients that `input_grad` deferred."""
        noted = self._flights.pop(portion).noted
        assert noted is not None
        self.state.gradients.run_deferred(noted)

    def _input_gradients(self, flight: _Flight, gradients: Carry) -> Carry:
        roots = {name: tensor for name, tensor in flight.outputs.items() if tensor.requires_grad}
        # The backward starts at the loss.
        torch.autograd.backward(
            list(roots.values()), [gradients[name] if gradients else torch.ones_like(roots[name]) for name in roots]
        )
        found = {name: tensor.grad for name, tensor in flight.inputs.items() if tensor.requires_grad}
        return {name: torch.zeros_like(flight.inputs[name]) if grad is None else grad for name, grad in found.items()}
