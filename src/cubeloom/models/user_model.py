"""A user's own model as a source: `file.py:function`. The file is executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.base.registry import executed, function_of
from cubeloom.models.external import filled_by, forwarding_loss, random_batch
from cubeloom.models.losses import Loss
from cubeloom.models.named import LOSSES
from cubeloom.models.naming import Naming, naming_of
from cubeloom.parallel import AnyCut, Batch
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.traced import Tracing

FAMILY = "file"
"""The kind of such models in a checkpoint's description."""
_ANY = 2**30


@dataclass(frozen=True)
class UserModel:
    """A `ModelSource`. The function returns a module, or a pair of a module and its cut. The file may define `example`."""

    file: str
    function: str
    loss: str | Loss | None = field(default=None, kw_only=True)
    """A name in LOSSES or a function, instead of the model's own."""

    @property
    def name(self) -> str:
        return f"{Path(self.file).name}:{self.function}"

    @property
    def positions(self) -> int | None:
        return _ANY  # the model itself knows its limit

    @property
    def vocabulary(self) -> int | None:
        """From its configuration, if it has one, or the entries of its first table."""
        return _vocabulary(self)

    @property
    def traced(self) -> bool:
        return self._own_cut() is None

    def build(self) -> nn.Module:
        loss = LOSSES.find(self.loss) if isinstance(self.loss, str) else self.loss
        return forwarding_loss(self._made()[0], loss=loss)

    def cut(self, model: nn.Module) -> AnyCut:
        own = self._own_cut()
        return _tracing(self) if own is None else own

    def fill(self, model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> Fill:
        if any(buffer.is_meta for buffer in model.buffers()):
            with torch.device("cpu"):
                made = dict(self._made()[0].named_buffers(remove_duplicate=False))
            for name, _ in list(model.named_buffers(remove_duplicate=False)):
                owner, _, attribute = name.rpartition(".")
                torch_private.buffers_of(model.get_submodule(owner))[attribute] = made[name]
        return filled_by(model, seed, dtype, device)

    def samples(self, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """From the file's `example(samples, sequence, seed)`, or random samples for a model that takes tokens."""
        example = self._example()
        if example is None:
            with torch.device("meta"):
                model = self.build()
            return random_batch(model, batch, seed, step, dtype)
        given = example(batch.samples, batch.sequence, seed * 1_000_003 + step)
        if not isinstance(given, dict):
            raise UserError(f"{self.file}: example must give the keyword arguments of one batch as a dict")
        return {name: _in(each, dtype) for name, each in given.items()}

    @property
    def naming(self) -> Naming:
        return _naming(self)

    def describe(self) -> dict[str, Any]:
        return {"family": FAMILY, "file": self.file, "function": self.function}

    def _own_cut(self) -> AnyCut | None:
        with torch.device("meta"):
            return self._made()[1]

    def _made(self) -> tuple[nn.Module, AnyCut | None]:
        made = self._function()()
        module, cut = made if isinstance(made, tuple) else (made, None)
        if not isinstance(module, nn.Module):
            raise UserError(f"{self.name} gives {type(module).__name__}, and must give a torch.nn.Module")
        return module, cut

    def _function(self) -> Callable[[], Any]:
        found: Callable[[], Any] = function_of(self.file, self.function)
        return found

    def _example(self) -> Callable[[int, int, int], Any] | None:
        return getattr(executed(self.file), "example", None)


@dataclass(frozen=True)
class GivenModel(UserModel):
    """The same for a function of the running program."""

    make: Callable[[], nn.Module]
    example: Callable[[int, int, int], Any] | None = None

    @classmethod
    def of(
        cls,
        make: Callable[[], nn.Module],
        example: Callable[[int, int, int], Any] | None = None,
        loss: str | Loss | None = None,
    ) -> GivenModel:
        name = getattr(make, "__qualname__", type(make).__name__)
        return cls(getattr(make, "__module__", ""), name, make, example, loss=loss)

    def _function(self) -> Callable[[], Any]:
        return self.make

    def _example(self) -> Callable[[int, int, int], Any] | None:
        return self.example


def _in(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@cache
def _tracing(source: UserModel) -> Tracing:
    return Tracing(lambda batch: source.samples(batch, 0, 0, torch.get_default_dtype()))


@cache
def _vocabulary(source: UserModel) -> int | None:
    with torch.device("meta"):
        model = source.build()
    said = getattr(getattr(model, "config", None), "vocab_size", None)
    tables = (each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding))
    return int(said) if isinstance(said, int) else next(tables, None)


@cache
def _naming(source: UserModel) -> Naming:
    with torch.device("meta"):
        return naming_of(source.build())
