"""Recognises linears, convolutions, tables and norms that can be sharded, whoever wrote them.

A user-defined norm is recognised by its results on a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cubeloom.base import torch_private
from cubeloom.parallel.cut import CutError
from cubeloom.parallel.products import Convolution, Convolve, is_conv1d

# These exact types: a subclass may compute something else.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_Module = TypeVar("_Module", bound=nn.Module)
_LARGEST_EPS = 1e-2
_CLOSE = 1e-5  # most norms compute in float32


@dataclass(frozen=True)
class Linear:
    """A linear, or a convolution with `kernel_numel` elements per pair of features."""

    k: int
    n: int
    bias: bool
    kernel_numel: int = 1
    transposed: bool = False  # the weight is stored as [K, N, …]
    dim: int = -1  # the feature dimension of its input and output
    rank: int | None = None  # the number of dimensions of its input; None: any number from two up


@dataclass(frozen=True)
class Table:
    """Rows looked up by index, times `scale`."""

    entries: int
    features: int
    padding: int | None = None  # the row that is not trained
    scale: float = 1.0


@dataclass(frozen=True)
class Norm:
    """LayerNorm (centred) or RMSNorm of the last dimension. The weight is the parameter plus `offset`."""

    features: int
    centred: bool
    weight: bool
    bias: bool
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class ChannelNorm:
    """GroupNorm, or BatchNorm where there are no groups, of the second dimension; and what its module does with each number."""

    features: int
    weight: bool
    bias: bool
    groups: int | None = None
    of_batch: bool = False  # it normalises with the statistics of the batch
    remembers: bool = False  # and adds them to running ones


Known = Linear | Table | Norm | ChannelNorm


def known(module: nn.Module) -> Known | None:
    """The kind of layer, if it can be sharded."""
    if torch_private.has_backward_hooks(module):
        return None
    if isinstance(module, nn.GroupNorm | torch_private.AnyBatchNorm):
        return _channel_norm(module)
    if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
        return None
    return _linear(module) or _table(module) or _norm(module)


def _linear(module: nn.Module) -> Linear | None:
    if isinstance(module, nn.Linear) and (type(module).forward is nn.Linear.forward or _computes_linear(module)):
        return Linear(module.in_features, module.out_features, module.bias is not None)
    if is_conv1d(module):
        weight = module.weight
        assert isinstance(weight, Tensor)
        return Linear(weight.shape[0], weight.shape[1], bias=True, transposed=True)
    if not isinstance(module, Convolution) or type(module) not in _CONVOLUTIONS or module.groups > 1:
        return None
    try:
        Convolve.like(module)
    except CutError:
        return None
    return Linear(
        module.in_channels,
        module.out_channels,
        module.bias is not None,
        prod(module.kernel_size),
        module.transposed,
        dim=1,
        rank=len(module.kernel_size) + 2,
    )


def _computes_linear(module: nn.Linear) -> bool:
    """Whether a linear with its own forward computes what torch's does: compared on a small one."""
    tried = _small(module, out_features=7, in_features=5)
    if module.bias is not None:
        tried.bias = nn.Parameter(torch.rand(7, dtype=torch.float64))
    x = torch.linspace(-2, 3, 2 * 5, dtype=torch.float64).sin().view(2, -1)
    found = _computed(tried, x)
    with torch.no_grad():
        expected = nn.Linear.forward(tried, x)
    return found is not None and found.shape == expected.shape and torch.allclose(found, expected)


def _table(module: nn.Module) -> Table | None:
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    if module.scale_grad_by_freq or module.sparse:
        return None
    scale = 1.0 if type(module).forward is nn.Embedding.forward else _scale(module)
    if scale is None:
        return None
    return Table(module.num_embeddings, module.embedding_dim, module.padding_idx, scale)


def _scale(module: nn.Embedding) -> float | None:
    """The factor by which a user-defined embedding multiplies its rows."""
    tried = _small(module, num_embeddings=7, embedding_dim=5)
    index = torch.arange(3, 6)
    found = _computed(tried, index)
    if found is None:
        return None
    plain = tried.get_parameter("weight").detach()[index]
    if found.shape != plain.shape:
        return None
    scale = float(found.flatten()[0] / plain.flatten()[0])
    return scale if torch.allclose(found, plain * scale, rtol=_CLOSE) else None


def _norm(module: nn.Module) -> Norm | None:
    own = {name: each for name, each in torch_private.parameters_of(module).items() if each is not None}
    if list(module.children()) or not set(own) <= {"weight", "bias"} or any(each.dim() != 1 for each in own.values()):
        return None
    features = _features(module, own)
    if features is None or any(each.numel() != features for each in own.values()):
        return None
    tried = _with_values(module)
    x = torch.linspace(-2, 3, 3 * features, dtype=torch.float64).sin().view(3, features) * 0.01 + 0.003
    found = _computed(tried, x)
    if found is None or found.shape != x.shape:
        return None
    values = dict(tried.named_parameters())
    for centred, eps, offset in product((False, True), _epsilons(module), (0.0, 1.0)):
        norm = Norm(features, centred, "weight" in own, "bias" in own, eps, offset if "weight" in own else 0.0)
        if torch.allclose(found.double(), _of(norm, x, values), rtol=_CLOSE, atol=_CLOSE / 10):
            return norm
    return None


def _of(norm: Norm, x: Tensor, values: dict[str, nn.Parameter]) -> Tensor:
    weight = values["weight"].detach() + norm.offset if norm.weight else None
    if norm.centred:
        return functional.layer_norm(x, x.shape[-1:], weight, values["bias"].detach() if norm.bias else None, norm.eps)
    y = functional.rms_norm(x, x.shape[-1:], weight, norm.eps)
    return y + values["bias"].detach() if norm.bias else y


def _channel_norm(module: nn.GroupNorm | torch_private.AnyBatchNorm) -> ChannelNorm | None:
    plain = (nn.GroupNorm.forward, torch_private.AnyBatchNorm.forward)
    if set(dict(module.named_parameters())) - {"weight", "bias"}:
        return None
    if type(module).forward not in plain and not _normalises_and_acts(module):
        return None
    weight, bias = (getattr(module, kind) is not None for kind in ("weight", "bias"))
    if isinstance(module, nn.GroupNorm):
        return ChannelNorm(module.num_channels, weight, bias, groups=module.num_groups)
    of_batch = module.training or module.running_mean is None
    remembers = module.training and module.running_mean is not None
    return ChannelNorm(module.num_features, weight, bias, of_batch=of_batch, remembers=remembers)


class _Passing(TorchFunctionMode):
    """Norms of channels give what they take; how often they are called with what the module was given."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given, self.calls = given, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (functional.batch_norm, functional.group_norm):
            return function(*args, **(kwargs or {}))
        self.calls += 1 if args and args[0] is self.given else 2
        return args[0].clone()


def _normalises_and_acts(module: nn.Module) -> bool:
    """A norm of somebody's own calls torch's once, and what it does behind it is done with each number for itself: tried."""
    if any(isinstance(each, _DROPOUTS) and each.training and each.p for each in module.modules()):
        return False
    tried = _with_values(module)
    features = int(getattr(module, "num_features", 0) or getattr(module, "num_channels", 0))
    shape = (2, features, *[3] * (3 if isinstance(module, nn.BatchNorm3d) else 2))
    x = torch.linspace(-3, 3, prod(shape), dtype=torch.float64).sin().view(shape) * 3
    other = x.clone()
    other[0, 0, 0] += 1.5
    found = []
    for each in (x, x.flip(list(range(x.dim()))), other):
        with _Passing(each) as norms:
            found.append(_computed(tried, each))
        if norms.calls != 1:
            return False
    first, flipped, changed = found
    if first is None or flipped is None or changed is None or first.shape != x.shape:
        return False
    same = changed == first
    same[0, 0, 0] = True
    return torch.equal(flipped.flip(list(range(x.dim()))), first) and bool(same.all())


def _features(module: nn.Module, own: dict[str, nn.Parameter]) -> int | None:
    if own:
        return next(iter(own.values())).numel()
    shape = getattr(module, "normalized_shape", None)
    return shape[0] if isinstance(shape, tuple | list) and len(shape) == 1 else None


def _epsilons(module: nn.Module) -> Iterator[float]:
    """What the module may add to a variance: any small number among its attributes."""
    found = [value for value in vars(module).values() if isinstance(value, float) and 0 <= value <= _LARGEST_EPS]
    yield from dict.fromkeys([*found, 1e-5, 1e-6, 1e-12, 0.0, torch.finfo(torch.float64).eps])


def _small(module: _Module, **sizes: int) -> _Module:
    """A copy with a weight of these sizes, which are also set in the attributes of these names."""
    memo: dict[int, object] = {id(each): None for each in module.parameters()}
    made = deepcopy(module, memo).eval()
    for name, size in sizes.items():
        setattr(made, name, size)
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(*sizes.values(), dtype=torch.float64, generator=generator) + 0.5
    torch_private.parameters_of(made)["weight"] = nn.Parameter(weight)
    return made


def _with_values(module: nn.Module) -> nn.Module:
    """A copy on the CPU, in float64, whose parameters have distinct values."""
    memo: dict[int, object] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for each in module.parameters():
            memo[id(each)] = nn.Parameter(torch.rand(each.shape, dtype=torch.float64) + 0.5)
        return deepcopy(module, memo).eval()


def _computed(module: nn.Module, x: Tensor) -> Tensor | None:
    try:
        with torch.device("cpu"), torch.no_grad():
            found = module.forward(x)
    except Exception:  # it takes other inputs
        return None
    return found if isinstance(found, Tensor) else None


def held_elsewhere(module: nn.Module) -> str | None:
    """An attribute that holds parameters in a way in which they cannot be replaced, as in torch's recurrent layers."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_modules"):
            continue
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(each, nn.Parameter) for each in inner):
            return name
    return None
