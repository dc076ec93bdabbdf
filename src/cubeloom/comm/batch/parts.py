"""A tensor of the whole batch as a rank stores it: its samples, and the dimension that they are in."""

from __future__ import annotations

from typing import Any, Protocol, Self

from torch import Tensor

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm.axis import Axis
from cubeloom.comm.batch.line import line
from cubeloom.comm.batch.sums import Gathered


class LooksWhole(Protocol):
    """A tensor that is gathered if it is needed whole, such as logits whose classes are cut."""

    def whole(self) -> Tensor: ...


class Parts(Tensor):
    """Its shape is `sizes`, that of the whole batch. `part` is what this rank stores: its samples, in dimension `cut`."""

    part: Tensor
    cut: int
    axis: Axis
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, part: Tensor, cut: int, axis: Axis) -> Self:
        cut %= part.dim()
        sizes = tuple(size * axis.size if at == cut else size for at, size in enumerate(part.shape))
        made: Self = torch_private.without_values(cls, sizes, part.dtype, part.device)
        made.part, made.cut, made.axis, made.sizes = part, cut, axis, sizes
        return made.looking_again()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        refuse(f"{getattr(func, '__name__', func)} takes", "an operation that is hidden from torch's functions")

    def looking_again(self) -> Self:
        """Refuse a backward that arrives by another way than torch's functions: its gradient would not reach the model."""
        with torch_private.without_subclasses():
            if self.part.requires_grad and not self.requires_grad:
                self.requires_grad_().register_hook(_refuse_gradient)
        return self

    def like(self, part: Tensor, cut: int) -> Self:
        """The same samples of another tensor."""
        return type(self).of(part, cut, self.axis)

    @property
    def behind(self) -> int:
        """The dimension of the samples, counted from the last, which is 1."""
        return len(self.sizes) - self.cut

    def own(self) -> Tensor:
        """The rank's part as a plain tensor."""
        part: Any = self.part
        return part.whole() if hasattr(part, "whole") else part

    def gathered(self) -> Tensor:
        found: Tensor = Gathered.apply(self.own(), self.axis, self.cut, "samples")
        return found


def refuse(what: str, why: str) -> Any:
    here = line()
    raise UserError(
        f"{here and here + ': '}{what} a tensor of the whole batch, of which this rank has its samples only: {why}. Write it"
        " with functions of torch, or gather the batch first with mesh.gather(tensor)"
    )


def _refuse_gradient(_: Tensor) -> Any:
    return refuse("an autograd function has taken", "its backward would not reach the model")
