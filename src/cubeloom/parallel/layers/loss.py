"""Cross-entropy of logits with the vocabulary over y and rows over z and x: `[M/(z·x), V/y]`, whole on no rank.

Each row's maximum logit, sum of exponentials and target logit are all-reduced over y. The mean is over all targets of
the whole batch that are not ignored, so every rank has the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.comm import Axis
from cubeloom.comm.batch import Mean
from cubeloom.parallel import weave
from cubeloom.parallel.layers.classes import Classes
from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.layers.head import CubeHead, DeferredLogits
from cubeloom.parallel.layers.head_rows import Steps, put_target
from cubeloom.parallel.layers.indices import check_indices
from cubeloom.parallel.parameter import own_part
from cubeloom.parallel.specs import LossSpec
from cubeloom.parallel.state import CubeState


@dataclass(frozen=True)
class Loss(Declared):
    """The mean cross-entropy of logits with classes over y and rows over z and x.

    `whole`: every rank of x and y has all classes and all rows of its z rank.
    `head`: the layer that computes the logits. It is padded if the grid does not divide the classes.
    """

    whole: bool = False
    head: str | None = None

    def spec(self, name: str, module: nn.Module, seen: Seen) -> LossSpec:
        smoothing, ignored = getattr(module, "label_smoothing", 0.0), getattr(module, "ignore_index", -100)
        return LossSpec(name=name, smoothing=float(smoothing), ignored=int(ignored), whole=self.whole, head=self.head)


class CubeCrossEntropy(nn.Module):
    def __init__(self, spec: LossSpec, state: CubeState) -> None:
        super().__init__()
        network, whole = state.network, spec.whole
        self._rows = own_part(network.axis("x")) if not whole else None
        self._vocabulary = network.axis("y") if not whole else None
        self._everybody = network.axis("data", "z", *(() if whole else ("x",)))
        self._ranks = network.grid.data * network.grid.z
        self._smoothing = spec.smoothing
        self._ignored = spec.ignored
        self._origin = spec.name
        self._shares = state.shares
        arranged = spec.arrangement(state.config)
        self._classes = None if arranged is None else Classes.of(arranged, network.axis("y"))
        self._steps = Steps()

    def compile_local(self, backend: str) -> None:
        """Compile the operations between collectives."""
        self._steps = self._steps.compiled(backend)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """`targets` are those of the z rank, `[M/z]`."""
        if isinstance(logits, DeferredLogits):
            head, hidden = logits.head, logits.hidden
            count = head.classes.count
            return self._mean_loss(lambda own, counted: self._head_sum(head, hidden, own, counted), targets, count)
        # torch checks the targets if each rank has the whole vocabulary.
        if self._vocabulary is None:
            return self._mean_loss(lambda own, counted: self._whole_sum(logits, own, counted), targets, None)
        classes = self._classes or Classes.even(logits.shape[-1], self._vocabulary)
        return self._mean_loss(lambda own, counted: self._sum(logits, own, counted, classes), targets, classes.count)

    def count(self, targets: Tensor) -> Tensor:
        """The number of these targets that are not ignored."""
        return (targets != self._ignored).sum().double()

    def _mean_loss(self, sum_of: Callable[[Tensor, Tensor], Tensor], targets: Tensor, classes: int | None) -> Tensor:
        """The mean, from the sum over this rank's targets and from which of them count."""
        if classes is not None:
            check_indices(targets, classes, f"{self._origin}: target", self._ignored)
        if self._rows is not None:
            targets = self._rows(targets)
        counted = targets != self._ignored
        total = sum_of(targets, counted)
        # The strands of a weave share one loss.
        return weave.meet(self._mean, total, counted.sum().to(total.dtype))

    def _head_sum(self, head: CubeHead, hidden: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        assert self._vocabulary is not None
        return head.loss_sum(hidden, targets, counted, self._smoothing, self._vocabulary, self._origin)

    def _whole_sum(self, logits: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            logits, targets, ignore_index=self._ignored, label_smoothing=self._smoothing, reduction="sum"
        )

    def _sum(self, logits: Tensor, targets: Tensor, counted: Tensor, classes: Classes) -> Tensor:
        assert self._vocabulary is not None
        smoothing, origin = self._smoothing, self._origin
        return VocabularyCrossEntropy.apply(
            logits, targets, counted, smoothing, self._vocabulary, classes, origin, self._steps
        )

    def _mean(self, total: Tensor, count: Tensor) -> Tensor:
        mean = Mean.apply(total, count, self._everybody, self._ranks, self._origin)
        return share_of(mean, self._shares.get(self._origin))


def share_of(mean: Tensor, share: Tensor | None) -> Tensor:
    """A micro-batch's loss as its share of the batch's loss; the loss itself if there is only one micro-batch."""
    return mean if share is None else _Part.apply(mean, share.to(mean.dtype))


class _Part(torch.autograd.Function):
    """A product that saves no tensor: a recomputed stage would run its head again to get it.

    A micro-batch whose targets are all ignored has a share of 0 and a mean of 0/0: it contributes zero.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, share: Tensor) -> Tensor:
        ctx.share = share
        return (share * mean).masked_fill(share == 0, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.share * gradient, None


class VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        counted: Tensor,
        smoothing: float,
        vocabulary: Axis,
        classes: Classes,
        origin: str,
        steps: Steps,
    ) -> Tensor:
        """The sum over this rank's rows."""
        safe, here = classes.own(targets, logits.shape[-1])
        largest = vocabulary.all_reduce(steps.largest(logits), f"{origin} largest", largest=True).wait()
        exponentials, sums = steps.exponentials(logits, largest, safe, here, smoothing)
        sums = vocabulary.all_reduce(sums, f"{origin} sums").wait()
        ctx.save_for_backward(exponentials, sums[0], safe, here, counted)
        ctx.smoothing, ctx.classes, ctx.dtype, ctx.steps = smoothing, classes.count, logits.dtype, steps
        return steps.losses(sums, counted, smoothing, classes.count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, total, safe, here, counted = ctx.saved_tensors
        rows = (counted * gradient).to(exponentials.dtype)
        slopes, target = ctx.steps.slopes(exponentials, total, safe, here, rows, ctx.smoothing, ctx.classes, ctx.dtype)
        put_target(slopes, safe, here, target)
        return slopes, *[None] * 7


@make_layer.register
def _(spec: LossSpec, making: Making) -> nn.Module:
    return CubeCrossEntropy(spec, making.state)
