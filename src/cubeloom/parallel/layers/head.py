"""A fused head and cross-entropy: it computes a chunk of rows at a time, so the logits never exist as a whole.

Once the losses of a chunk are known, its logits are overwritten with the gradients of these losses, from which the
chunk's gradients of input and weight are computed. The forward therefore does all three matmuls, each once; the
backward scales the results.

    X [M/z, K]      W [V/y, K]      logits of a chunk [rows, V/y]

The vocabulary may be cut over y: then each row's maximum and sums are all-reduced over y, as in `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.comm import Axis
from cubeloom.parallel import weave
from cubeloom.parallel.gradients import Gradients, WeightGradient
from cubeloom.parallel.layers.classes import Classes
from cubeloom.parallel.layers.head_rows import Steps, put_target
from cubeloom.parallel.layers.linear import CubeLinear
from cubeloom.parallel.products import Product, add_product, add_to
from cubeloom.parallel.specs import LinearSpec
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight

CHUNK_BYTES = 2**29


class DeferredLogits(Tensor):
    """Logits that are not computed yet. The cross-entropy computes them with the loss, any other operation before it."""

    head: CubeHead
    hidden: Tensor
    computed: Tensor | None = None

    @staticmethod
    def of(head: CubeHead, hidden: Tensor) -> DeferredLogits:
        with torch_private.real_tensors():  # a rehearsal's tensors have their own class
            looks = torch.empty((), dtype=hidden.dtype, device=hidden.device).expand(head.shape_of(hidden))
            made: DeferredLogits = looks.as_subclass(DeferredLogits)
        made.head, made.hidden = head, hidden
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _LOOKS:
            with torch_private.without_subclasses():
                return function(*args)
        return function(*torch_private.tree_map(_computed, args), **torch_private.tree_map(_computed, kwargs or {}))


_LOOKS = {*(getattr(Tensor, name).__get__ for name in ("shape", "device", "dtype", "ndim")), Tensor.size, Tensor.dim}


def _computed(value: Any) -> Any:
    if not isinstance(value, DeferredLogits):
        return value
    if value.computed is None:
        value.computed = value.head.logits(value.hidden)
    return value.computed


class CubeHead(CubeLinear):
    """A linear without a bias, whose inner dimension is not cut and whose weight is whole along z."""

    def __init__(
        self, spec: LinearSpec, state: CubeState, weight: Weight, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__(spec, state, weight, bias, product)
        along_y, arranged = state.network.axis("y"), spec.arrangement(state.config)
        self.classes = (
            Classes.even(spec.n // along_y.size, along_y) if arranged is None else Classes.of(arranged, along_y)
        )
        self.chunk_bytes = CHUNK_BYTES  # of logits
        self._steps = Steps()
        self._rows_gathered = along_y.size if spec.spread_in(state.config) == "rows" else 1

    def compile_local(self, backend: str) -> None:
        """Compile the operations on a chunk between matmuls and collectives."""
        self._steps = self._steps.compiled(backend)

    def forward(self, x: Tensor) -> Tensor:
        return DeferredLogits.of(self, x)

    def logits(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def shape_of(self, x: Tensor) -> tuple[int, ...]:
        """The shape of this rank's logits."""
        first, *rest = x.shape[:-1]
        own = self.classes.part if self._own_classes is None else self._own_classes
        return first * self._rows_gathered, *rest, own

    def loss_sum(
        self, x: Tensor, targets: Tensor, counted: Tensor, smoothing: float, vocabulary: Axis, origin: str
    ) -> Tensor:
        """The sum of the losses of this rank's rows. `targets` and `counted` (which of them count) are `[M/z]`."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        whole = self._input(x)
        weight = self._gathered.forward(self._name, backward_needs_it=False).to(whole.dtype)
        chunk = chunk_rows(len(whole), len(weight) * whole.itemsize, self.chunk_bytes)  # the same on all ranks of y
        call = _Call(
            targets,
            counted,
            smoothing,
            vocabulary,
            self.classes,
            origin,
            self._steps,
            chunk,
            torch.is_grad_enabled(),
            self._name,
            self._gathered,
            self._state.gradients,
        )
        # All tensors have one dtype here. On a GPU autocast would turn the gradients into float32, which the matmuls
        # reject.
        with torch.autocast(kind, enabled=False):
            found = _HeadAndLoss.apply(whole, self.weight, weight, self._own_classes, call)
        self._gathered.read("forward", weave.place()[1])
        if self._lone_matmul:
            weave.pause()
        return found


def chunk_rows(rows: int, row_bytes: int, most: int) -> int:
    """Rows of a chunk: all rows, halved until their logits are small enough, so that chunks have equal sizes."""
    while rows > 1 and rows * row_bytes > most:
        rows = -(-rows // 2)
    return rows


@dataclass(frozen=True)
class _Call:
    """One use of the head."""

    targets: Tensor
    counted: Tensor
    smoothing: float
    vocabulary: Axis
    classes: Classes
    origin: str
    steps: Steps
    chunk: int  # rows
    wants_gradients: bool
    layer: str
    weight: Weight
    gradients: Gradients

    def loss_of(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The loss of a chunk, and its gradient with respect to the logits if needed, as if every row counted."""
        axis, steps = self.vocabulary, self.steps
        counted = self.counted[rows]
        safe, here = self.classes.own(self.targets[rows], logits.shape[-1])
        if axis.size == 1:
            loss, found, at_target = steps.alone(logits, safe, here, counted, self.smoothing, self.wants_gradients)
            slopes = logits if found is None else found
        else:
            slopes, at_target, classes = logits, None, self.classes.count
            largest = axis.all_reduce(steps.largest(logits), f"{self.origin} largest", largest=True).wait()
            sums = steps.sums(logits, largest, safe, here, self.smoothing)
            sums = axis.all_reduce(sums, f"{self.origin} sums").wait()
            loss = steps.losses(sums, counted, self.smoothing, classes)
            if self.wants_gradients:
                at_target = steps.slope(logits, largest, sums, self.smoothing, classes)
        if at_target is not None:
            put_target(slopes, safe, here, at_target)
        return loss, slopes

    def chunks(self) -> Iterator[slice]:
        for first in range(0, len(self.targets), self.chunk):
            yield slice(first, first + self.chunk)


class _HeadAndLoss(torch.autograd.Function):
    """The parameter is passed for the autograd graph. `weight` has its values; rows after the first `filled` are
    padding.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: nn.Parameter, weight: Tensor, filled: int | None, call: _Call
    ) -> Tensor:
        wanted = [call.wants_gradients and each for each in ctx.needs_input_grad[:2]]
        dtype = call.gradients.dtype_of(parameter)
        dx = torch.empty_like(x) if wanted[0] else None
        dw: Tensor | None = None
        padded_dw: Tensor | None = None
        if filled is not None:
            if wanted[1]:
                padded_dw = torch.zeros_like(weight, dtype=dtype)
                dw = padded_dw[:filled]
            weight = weight[:filled]
        losses = []
        for rows in call.chunks():
            part = x[rows]
            loss, slopes = call.loss_of(part @ weight.t(), rows)
            losses.append(loss)
            # Rows that do not count are zeroed in the narrow operand: the logits' gradients are as wide as the
            # vocabulary.
            counted = call.counted[rows].unsqueeze(-1).to(x.dtype)
            if dx is not None:
                torch.mm(slopes, weight, out=dx[rows]).mul_(counted)
            if wanted[1]:
                dw = add_product(dw, slopes.t(), part * counted, dtype)
        # Kept here and not with save_for_backward: a recomputed stage would discard the gradients and compute them
        # twice.
        ctx.found = dx, dw if padded_dw is None else padded_dw
        ctx.parameter, ctx.call, ctx.use = parameter, call, call.gradients.use(parameter)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (dx, dw), ctx.found = ctx.found, None
        call: _Call = ctx.call
        scale = call.steps.scale
        if dw is not None:

            def product(into: Tensor | None, dtype: torch.dtype) -> Tensor:
                return add_to(into, scale(dw, gradient))

            call.gradients.weight_gradient(WeightGradient(ctx.parameter, call.layer, product, call.weight.scatter))
        ctx.use.done()
        return None if dx is None else scale(dx, gradient), None, None, None, None
