"""What is needed to train external models, which others wrote: a forward that returns the loss, values, and batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cubeloom.base import counter
from cubeloom.base.initial import Constant, Initial, Normal
from cubeloom.models.example import example_of
from cubeloom.models.losses import Loss, with_loss
from cubeloom.parallel import Batch
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.traced.known import ChannelNorm, Norm, known

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_STD = 0.02
_IGNORED = 1 / 8


class Stored(Protocol):
    """Tensors in files, by the model's names."""

    def has(self, name: str) -> bool: ...

    def block(self, name: str, slices: tuple[slice, ...]) -> Tensor: ...


class InDouble(TorchFunctionMode):
    """Many models compute norms, angles and losses in float32, whatever their dtype.

    For a float64 model these are computed in float64 too, so that a grid can be compared with the serial model to the
    last digits.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextmanager
def _in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(before)


def forwarding_loss(model: nn.Module, in_double: bool = True, loss: Loss | None = None) -> nn.Module:
    """The same module, whose forward returns only the loss, even if its own returns an object or a tuple with it.

    `in_double`: a float64 model computes everything in float64. `loss`: computes it from the forward's output.
    """
    model = model if loss is None else with_loss(model, loss)
    kind = type(model)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        double = in_double and next((each.dtype for each in self.parameters()), None) is torch.float64
        with _in_double() if double else nullcontext():
            found = kind.forward(self, *arguments, **named)
        if isinstance(found, Tensor):
            return found
        loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if loss is None and isinstance(found, tuple):
            loss = next((each for each in found if isinstance(each, Tensor) and not each.dim()), None)
        return found if loss is None else loss

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch dropout off: between layers with cut features masks cannot be drawn by position, independently of the
    grid.
    """
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            own = {} if owner is None else vars(owner)
            for name, value in list(own.items()):
                if ("drop" in name or (name == "p" and isinstance(module, _DROPOUTS))) and isinstance(value, float):
                    setattr(owner, name, 0.0)
    return model


def filled_by(
    model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device, stored: Stored | None = None
) -> Fill:
    """Stored values if there are any; otherwise values that depend only on seed, name and index, and computed buffers."""
    initial = _initial(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))

    def fill(name: str, block: Block) -> Tensor:
        if name not in initial:
            if stored is not None and stored.has(name):
                return stored.block(name, block.slices).to(device)
            value = buffers[name][block.slices]
            return value.to(device, dtype if value.is_floating_point() else value.dtype)
        if stored is not None and stored.has(name):
            return stored.block(name, block.slices).to(device, dtype)
        return block.draw(initial[name], counter.key(seed, name), dtype, device)

    return fill


def _initial(model: nn.Module) -> dict[str, Initial]:
    """The initialisation of each parameter, as in most models."""
    std = float(getattr(getattr(model, "config", None), "initializer_range", _STD) or _STD)
    found: dict[str, Initial] = {}
    for name, module in model.named_modules():
        kind = known(module) if list(module.parameters(recurse=False)) else None
        for own, _ in module.named_parameters(recurse=False):
            full = f"{name}.{own}" if name else own
            if own == "bias":
                found[full] = Constant(0.0)
            elif isinstance(kind, Norm):
                found[full] = Constant(1.0 - kind.offset)
            elif isinstance(kind, ChannelNorm):
                found[full] = Constant(1.0)
            else:
                found[full] = Normal(std)
    return found


def random_batch(model: nn.Module, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Like the model's example, with random numbers from seed and step alone."""
    example = example_of(model, batch.samples, batch.sequence)
    found: dict[str, Tensor] = {}
    for name, like in example.items():
        if not isinstance(like, Tensor):
            found[name] = like
            continue
        index = torch.arange(like.numel(), device="cpu").view(like.shape)
        drawn = counter.uniform(counter.key(seed, step, name), index)
        if like.is_floating_point():
            found[name] = (2 * drawn - 1).to(dtype)
        else:
            low, high = like.min().item(), like.max().item()
            found[name] = (low + drawn * (high - low + 1)).long()
        if name == "labels" and like.dim() == 2:  # of a language model: some are ignored
            ignored = counter.uniform(counter.key(seed, step, "ignored"), index) < _IGNORED
            found[name] = found[name].masked_fill(ignored, -100)
    return found
