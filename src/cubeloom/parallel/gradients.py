"""The gradients of one model on one rank: accumulated by our own backward, reduced over replicas in buckets.

A layer's node takes a `Use` of its parameter in the forward. In the backward it passes this rank's partial gradient to
`add`, or passes `weight_gradient` the means to compute it, and marks the use as done. Once no use of a parameter is
left in the graph, its bucket can be all-reduced while the backward continues. When `backward()` returns, every
`parameter.grad` is final.

Each rank's loss is the mean over its own samples, and the loss of the batch is the mean of these over the ranks of data
and z. Every sum is therefore divided by the number of these ranks. `parameter.grad` never holds a partial sum.
Gradients that autograd itself adds to it, such as that of a penalty on the parameter, are equal on every rank and are
left unchanged.

Inside `accumulating()` the reduction is left to a later backward, or to `reduce`. Inside `defer_weight_grads()` weight
gradients are deferred: `run_deferred` computes them, `reduce` reduces them (or `start_reduce` for some, and
`finish_reduce` for all).
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm import Axis, Pending
from cubeloom.parallel.arranged import Arranged
from cubeloom.parallel.buckets import BUCKET_BYTES, Arrival, Buckets, Receiver, Reduction, sum_copies
from cubeloom.parallel.config import GradientDtype
from cubeloom.parallel.parameter import like, local_of
from cubeloom.parallel.products import add_to
from cubeloom.parallel.use import EndOfBackward, Use
from cubeloom.parallel.weight_gradient import DeferredWeightGrads as DeferredWeightGrads
from cubeloom.parallel.weight_gradient import WeightGradient as WeightGradient

# From sets of names on this rank to their unions over all ranks.
AnyRank = Callable[[list[set[str]]], list[set[str]]]


class Gradients:
    """`dtype`: gradients of bfloat16 weights are summed in float32, or in the model's own dtype.

    With `any_rank` ranks agree on the parameters that a backward used; without it all ranks use the same. `observer` is
    told of every buffer in which a gradient is summed.
    """

    def __init__(
        self, dtype: GradientDtype = "float32", any_rank: AnyRank | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.observer: Callable[[Tensor], None] | None = None
        self.when_reduced: Callable[[], None] | None = None  # called once all gradients of a step are final
        self._wide = dtype == "float32"
        self._any_rank = any_rank
        self._reductions: dict[nn.Parameter, Reduction] = {}
        self.buckets = Buckets(self._reductions, self.dtype_of, bucket_bytes)
        self._sums: dict[nn.Parameter, Tensor] = {}  # this rank's, not reduced yet
        self._expected: set[nn.Parameter] | None = None  # the parameters that steps of a pipeline use on any rank
        self._uses: Counter[nn.Parameter] = Counter()  # in graphs without a backward so far
        self._seen_in_forward: set[str] | None = None
        self._final: set[nn.Parameter] = set()  # reduced during the passes that run now, while others accumulate
        self._noted: DeferredWeightGrads | None = None  # where deferred weight gradients are stored
        self._accumulating = False
        self._once = False  # only one pass accumulates
        self._reset()

    def _reset(self) -> None:
        """Forget a backward that failed."""
        self._arriving: deque[tuple[nn.Parameter, Pending]] = deque()
        self._strands: dict[tuple[nn.Parameter, str], tuple[Tensor, int]] = {}  # sums of products, and their numbers
        self._owed: Counter[nn.Parameter] = Counter()  # gradients still arriving
        self._waiting: set[nn.Parameter] = set()  # parameters without a use, but with a gradient still arriving
        self._backward = -1  # the current backward, at whose end `_end` is called
        self._end_of: weakref.ref[EndOfBackward] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Gradients:
        """For a copy of the model: the same reductions for its parameters. Pending work is not copied."""
        any_rank = deepcopy(self._any_rank, memo)
        made = Gradients("float32" if self._wide else "model", any_rank, self.buckets.limit)
        memo[id(self)] = made
        made.when_reduced = deepcopy(self.when_reduced, memo)
        for parameter, reduction in self._reductions.items():
            made.register(deepcopy(parameter, memo), reduction)
        return made

    def register(self, parameter: nn.Parameter, reduction: Reduction) -> None:
        self._reductions[parameter] = reduction
        if reduction.arranged is not None:
            reduction.arranged.network.gradients.add(self)

    def arranged(self, parameter: nn.Parameter) -> Arranged | None:
        """How the rows of a parameter are arranged, if they are not those of the whole tensor."""
        return self._reductions[parameter].arranged if parameter in self._reductions else None

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype in which a parameter's gradient is accumulated and reduced."""
        return torch.promote_types(parameter.dtype, torch.float32) if self._wide else parameter.dtype

    def use(self, parameter: nn.Parameter) -> Use:
        """A node of the forward uses the parameter. Raises UserError if the parameter was not part of the model."""
        if parameter not in self._reductions:
            if not parameter.requires_grad:
                return Use(self._uses, parameter, self._end_use, counted=False)
            raise UserError(
                f"a parameter of shape {list(parameter.shape)} was put in the place of one that was cut (by "
                "load_state_dict(assign=True), for instance), so its gradient would not be reduced; load without assign, or "
                "copy the values under torch.no_grad()"
            )
        if self._seen_in_forward is not None and parameter.requires_grad:
            self._seen_in_forward.add(self._reductions[parameter].name)
        # In a recomputation no backward passes through the created nodes.
        return Use(self._uses, parameter, self._end_use, counted=not torch_private.in_backward())

    @contextmanager
    def seen_in_forward(self) -> Iterator[set[str]]:
        """The names of parameters that forwards inside the block use."""
        self._seen_in_forward = found = set[str]()
        try:
            yield found
        finally:
            self._seen_in_forward = None

    def expect(self, names: Collection[str]) -> None:
        """Make `reduce` reduce exactly these. A rank that did not use one contributes zeros."""
        self._expected = {each for each, reduction in self._reductions.items() if reduction.name in names}

    def scatter_to(self, receiver: Receiver) -> None:
        """From now on each rank that reduces a gradient gets its part of it, if it can be divided (ZeRO-1)."""
        self.buckets.receiver = receiver

    def scatters(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient can be divided over the ranks that reduce it."""
        return self.buckets.divides(parameter)

    def axis(self, parameter: nn.Parameter) -> Axis:
        """The ranks that reduce the parameter's gradient."""
        return self._reductions[parameter].axis

    def clear(self) -> None:
        """Discard gradients that were accumulated and not reduced."""
        self._sums.clear()

    def sums(self) -> dict[nn.Parameter, Tensor]:
        """This rank's accumulated gradients."""
        return dict(self._sums)

    def accumulate_in(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """Let the following backwards add to these tensors."""
        self._sums = dict(sums)

    @contextmanager
    def accumulating(self, once: bool = False) -> Iterator[None]:
        """`once`: there is one backward inside."""
        outer = self._accumulating, self._once
        self._accumulating, self._once = True, once
        try:
            yield
        finally:
            self._accumulating, self._once = outer

    @contextmanager
    def defer_weight_grads(self) -> Iterator[DeferredWeightGrads]:
        outer, self._noted = self._noted, deque()
        try:
            yield self._noted
        finally:
            self._noted = outer

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add this rank's gradient of one use, unless the parameter is frozen. The tensor is not modified."""
        if not parameter.requires_grad:
            return
        self._hear_of_the_end()
        dtype = self.dtype_of(parameter)
        self._sum(parameter, lambda into: gradient.to(dtype, copy=True) if into is None else add_to(into, gradient))

    def _sum(self, parameter: nn.Parameter, product: Callable[[Tensor | None], Tensor]) -> None:
        held = self._sums.get(parameter)
        if held is None:
            held = self._whole_already(parameter)
        found = product(held)
        if held is None:
            self._sums[parameter] = found
            if self.observer is not None:
                self.observer(found)

    def _whole_already(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of earlier backwards, if there is nothing to reduce: then matmuls add to it in one pass."""
        how, grad = self._reductions[parameter], parameter.grad
        if grad is None or not how.alone or how.ranks > 1 or grad.dtype != self.dtype_of(parameter):
            return None
        return local_of(grad)

    def weight_gradient(self, wanted: WeightGradient) -> None:
        """Compute a gradient now, or defer it for `run_deferred`. Does nothing for a frozen parameter."""
        if not wanted.parameter.requires_grad:
            return
        if self._noted is not None:
            self._noted.append(wanted)
            return
        self._hear_of_the_end()
        self._compute(wanted)

    @torch.no_grad()
    def run_deferred(self, noted: DeferredWeightGrads) -> None:
        """Compute deferred weight gradients."""
        left = Counter(each.parameter for each in noted)
        for parameter in self._final.difference(left):
            self._complete(parameter)
        while noted:
            wanted = noted.popleft()
            self._compute(wanted)
            left[wanted.parameter] -= 1
            if not left[wanted.parameter] and wanted.parameter in self._final:
                self._complete(wanted.parameter)
        while self._arriving:
            self._arrive()

    def _compute(self, wanted: WeightGradient) -> None:
        if wanted.scatter is None:
            dtype = self._dtype_of_product(wanted.parameter)
            self._sum(wanted.parameter, lambda into: wanted.product(into, dtype))
            return
        key = (wanted.parameter, wanted.layer)
        earlier, strands = self._strands.pop(key, (None, 0))
        product = wanted.product(earlier, self.dtype_of(wanted.parameter))
        if strands + 1 < wanted.strands:
            self._strands[key] = product, strands + 1
            return
        self._owed[wanted.parameter] += 1
        self._arriving.append((wanted.parameter, wanted.scatter(product)))
        # One reduce-scatter may still overlap the next layer's computation.
        while len(self._arriving) > 1:
            self._arrive()

    def _dtype_of_product(self, parameter: nn.Parameter) -> torch.dtype:
        """That of the sum. If nothing is added to the product it is that of `grad`: it would be rounded to it anyway."""
        how = self._reductions[parameter]
        only = self._uses[parameter] == 1 and parameter not in self._sums and parameter.grad is None
        final = how.alone and how.ranks == 1 and (self._once or not self._accumulating)
        return (parameter.grad_dtype if only and final else None) or self.dtype_of(parameter)

    def _arrive(self) -> None:
        parameter, pending = self._arriving.popleft()
        arrived = pending.wait()
        self._sum(parameter, lambda into: add_to(into, arrived))
        self._owed[parameter] -= 1
        if not self._owed[parameter] and parameter in self._waiting:
            self._waiting.discard(parameter)
            self._ready(parameter)

    def _end_use(self, parameter: nn.Parameter) -> None:
        self._uses[parameter] -= 1
        waits = self._accumulating and parameter not in self._final
        if not (self._uses[parameter] or waits or self._noted is not None):
            self._complete(parameter)

    def _complete(self, parameter: nn.Parameter) -> None:
        """All of its gradients are computed; some may still arrive."""
        if self._owed[parameter]:
            self._waiting.add(parameter)
        else:
            self._ready(parameter)

    def _ready(self, parameter: nn.Parameter) -> None:
        """No more gradients come for this parameter, unless there is a second backward through a graph."""
        if parameter not in self._sums or (self._final and parameter not in self._final):
            return
        if self._reductions[parameter].alone:
            self._deliver(parameter, self._sums.pop(parameter), scale=True)
        elif self.axis(parameter).size > 1:
            self.buckets.ready(parameter, self._sums)

    def _hear_of_the_end(self) -> None:
        """Have `_end` called when the current backward ends. Does nothing outside of a backward."""
        running = torch_private.running_backward()
        if running in (-1, self._backward):
            return
        if self._end_of is not None and self._end_of() is None:
            self.abandon()
        end = EndOfBackward(self._end)
        self._backward, self._end_of = running, weakref.ref(end)
        torch_private.when_backward_ends(end)

    def abandon(self) -> None:
        """Discard everything of a failed backward: autograd has dropped the callback that would have ended it."""
        for _, pending in self._arriving:
            pending.wait()
        self.buckets.abandon()
        self.clear()
        self._reset()

    def _end(self) -> None:
        self._backward, self._end_of = -1, None
        while self._arriving:
            self._arrive()
        if self._accumulating or self._noted is not None:
            return
        sent = self.buckets.sent
        # Late gradients come from a part of the graph that had a backward before and was not expected again.
        used, late = self._agreed(sent.union(self._sums), sent.intersection(self._sums))
        self.buckets.send_rest(used, self._sums)
        self.buckets.send(late, self._sums)
        self._join_copies(used)
        self.finish_reduce()

    def _join_copies(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give zeros for parameters of which this rank has only copies, and whose gradient other ranks have."""
        for parameter in parameters:
            how = self._reductions[parameter]
            if how.axis.size == 1 and how.copies is not None and parameter not in self._sums:
                self._sums[parameter] = torch.zeros_like(local_of(parameter), dtype=self.dtype_of(parameter))

    def _agreed(self, *sets: set[nn.Parameter]) -> list[list[nn.Parameter]]:
        """For each set, the union over all ranks, in the order of registration."""
        names = [{self._reductions[each].name for each in some} for some in sets]
        if self._any_rank is not None:
            names = self._any_rank(names)
        return [[each for each, how in self._reductions.items() if how.name in some] for some in names]

    def reduce(self) -> None:
        """Reduce all gradients."""
        self.start_reduce(self._reductions)
        self.finish_reduce()

    def start_reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start to reduce the gradients of these."""
        chosen = self._wanted(parameters)
        self.buckets.send(chosen, self._sums)
        self._join_copies(chosen)

    @contextmanager
    def reducing(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """The passes inside are the last that add to these gradients: reduce each as soon as it is complete."""
        chosen = self._wanted(parameters)
        self._final = set(chosen)
        self.buckets.begin(chosen)
        try:
            yield
        finally:
            self._final = set()
        self.buckets.send_rest(self._wanted(chosen), self._sums)
        self._join_copies(chosen)

    def _wanted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Of these, those that have gradients on any rank, in the reverse order of registration."""
        expected = self._expected
        if expected is not None and not expected.issuperset(self._sums):
            name = next(self._reductions[each].name for each in self._sums if each not in expected)
            raise UserError(
                f"{name} got a gradient in this step, and no rank used it when the stages were first run; a pipeline needs "
                "the same parameters in every step"
            )
        chosen = set(parameters).intersection(self._sums if expected is None else expected)
        return [each for each in reversed(self._reductions) if each in chosen]

    def finish_reduce(self) -> None:
        """Await all started reductions. Gradients that need none are delivered now.

        Copies are summed last: in one message for all layers, and with a sharded optimizer only this rank's part.
        """
        copied: list[Arrival] = []
        for arrival in self._arrivals():
            if self._reductions[arrival.parameter].copies is None:
                self._hand_over(arrival)
            else:
                copied.append(arrival)
        sum_copies(copied, self._reductions)
        for arrival in copied:
            self._hand_over(arrival)
        if self.when_reduced is not None:
            self.when_reduced()

    def _arrivals(self) -> Iterator[Arrival]:
        yield from self.buckets.finish()
        for parameter in [each for each in self._reductions if each in self._sums and self.axis(each).size == 1]:
            found, ranks = self._sums.pop(parameter), self._reductions[parameter].ranks
            yield Arrival(parameter, found if ranks == 1 else found.mul_(1 / ranks), slice(0, len(found)))

    def _hand_over(self, arrival: Arrival) -> None:
        receiver = self.buckets.receiver
        if arrival.scattered and receiver is not None:
            receiver(arrival.parameter, arrival.gradient)
        else:
            self._deliver(arrival.parameter, arrival.gradient, scale=False)

    def _deliver(self, parameter: nn.Parameter, whole: Tensor, scale: bool) -> None:
        """Add a final gradient to the parameter's `.grad`."""
        ranks = self._reductions[parameter].ranks
        if scale and ranks > 1:
            whole.mul_(1 / ranks)
        if parameter.grad is None:
            # In the order of the parameter's own memory: fused optimizers read both as they lie.
            parameter.grad = like(parameter, whole.contiguous())
        else:
            local_of(parameter.grad).add_(whole)
