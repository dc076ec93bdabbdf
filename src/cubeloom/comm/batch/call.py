"""A call of a torch function with tensors of the whole batch, and what its other tensors are on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm.axis import Axis
from cubeloom.comm.batch.line import line
from cubeloom.comm.batch.parts import Parts
from cubeloom.comm.batch.sums import own_samples, used_by_each
from cubeloom.comm.batch.value import BatchValue, plain


class _NotFollowed:
    pass


NOT_FOLLOWED = _NotFollowed()
"""What a rule returns if the function needs the samples of all ranks."""


@dataclass(frozen=True)
class Call:
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [each for each in torch_private.tree_leaves((self.args, self.kwargs)) if isinstance(each, Tensor)]

    @cached_property
    def parts(self) -> list[Parts]:
        return [each for each in self.tensors if isinstance(each, Parts)]

    @property
    def like(self) -> Parts:
        return self.parts[0]

    @property
    def axis(self) -> Axis:
        return self.like.axis

    @property
    def samples(self) -> int:
        """The size of the samples' dimension in the whole batch."""
        return self.like.sizes[self.like.cut]

    @property
    def first(self) -> Any:
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    @property
    def rest(self) -> tuple[Any, ...]:
        return self.args[1:]

    @property
    def more(self) -> dict[str, Any]:
        """Named arguments behind the first."""
        return self.kwargs if self.args else dict(list(self.kwargs.items())[1:])

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        if len(self.args) > place:
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def changed(self, **named: Any) -> Call:
        return replace(self, kwargs={**self.kwargs, **named})

    def run(self, of: Callable[[Any], Any]) -> Any:
        """Call the function with each argument changed by `of`."""
        return self.function(*torch_private.tree_map(of, self.args), **torch_private.tree_map(of, self.kwargs))

    @property
    def behind(self) -> int | None:
        """The dimension of the samples in all tensors of the batch, counted from the last; None if they differ."""
        found = {(each.behind, each.sizes[each.cut]) for each in self.parts}
        return self.like.behind if len(found) == 1 else None

    def aligned(self, value: Any) -> Any:
        """This rank's part of an argument that is broadcast with the others."""
        if not isinstance(value, Tensor) or isinstance(value, Parts):
            return value.part if isinstance(value, Parts) else value
        return self.at(value, value.dim() - self.like.behind)

    def at(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that is the same on all ranks, with samples, or size 1, in this dimension."""
        if hasattr(whole, "full_tensor"):  # a DTensor: torch says what it can be combined with
            return whole
        whole = plain(whole)
        if dim < 0 or whole.shape[dim] == 1:
            return used_by_each(whole, self.axis)
        if whole.shape[dim] != self.samples:
            here = line()
            raise UserError(
                f"{here and here + ': '}{self.name} of {list(self.like.sizes)}, a tensor of the whole batch, and"
                f" {list(whole.shape)}: dimension {dim} of that has {whole.shape[dim]} numbers, and must have {self.samples},"
                " or 1. Take it from mesh.shard(batch) too; or from mesh.from_local(batch), where each rank loads samples of"
                " its own"
            )
        return own_samples(whole, self.axis, dim)

    def part(self, value: Any) -> Any:
        """This rank's samples of a tensor of the batch; any other tensor whole."""
        if isinstance(value, Parts):
            return value.part
        return self.at(value, -1) if isinstance(value, Tensor) else value

    def results(self, found: Any, behind: int) -> Any:
        """Results of a rank's samples, as tensors of the whole batch."""
        return torch_private.tree_map(
            lambda each: self.like.like(each, each.dim() - behind) if isinstance(each, Tensor) else each, found
        )

    def value(self, found: Tensor) -> Tensor:
        return BatchValue.of(found, self.axis)

    def look(self, strides: tuple[int, ...] | None = None) -> Tensor:
        """A tensor of the whole's shape without values."""
        if strides is None:
            return torch.empty(self.like.sizes, dtype=self.like.dtype, device="meta")
        return torch.empty_strided(self.like.sizes, strides, dtype=self.like.dtype, device="meta")
