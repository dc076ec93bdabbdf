"""What a tensor of the whole batch is on a rank: its samples, and in which dimension they are."""

from __future__ import annotations

from typing import Any, Protocol, Self

from torch import Tensor

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm.axis import Axis
from cubeloom.comm.batch.line import line
from cubeloom.comm.batch.sums import Gathered


class LooksWhole(Protocol):
    """Parts of features, say, that are gathered where they are needed whole."""

    def whole(self) -> Tensor: ...


class Parts(Tensor):
    """`sizes` of the whole to look at; `part` is what this rank has: its share of dimension `cut`, over `axis`."""

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
        """Whoever reaches it by another way than torch's functions would lose the gradient: then its backward is refused."""
        with torch_private.without_subclasses():
            if self.part.requires_grad and not self.requires_grad:
                self.requires_grad_().register_hook(_refuse_gradient)
        return self

    def like(self, part: Tensor, cut: int) -> Self:
        """The same samples of something else."""
        return type(self).of(part, cut, self.axis)

    @property
    def behind(self) -> int:
        """Where the samples are, counted from behind, from 1 on."""
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
