"""Which operations treat features one by one, so that they can be computed on cut features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

# By name, without underscores: `mul`, `__rmul__` and `mul_` differ only in where their operands and result are.
_ARITHMETIC = {
    "add",
    "sub",
    "mul",
    "div",
    "truediv",
    "true_divide",
    "pow",
    "neg",
    "pos",
    "square",
    "abs",
    "clamp",
    "clip",
}
_REVERSED = {f"{letter}{name}" for letter in "ri" for name in ("add", "sub", "mul", "truediv", "div", "pow")}
_FUNCTIONS = {"exp", "log", "sqrt", "rsqrt", "erf", "tanh", "sigmoid", "sin", "cos"}
_ACTIVATIONS = {
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign"),
    *("hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "logsigmoid", "threshold"),
}
_COPIES = {"contiguous", "clone", "to", "float", "double", "half", "bfloat16", "type_as"}
_ELEMENTWISE = _ARITHMETIC | _REVERSED | _FUNCTIONS | _ACTIVATIONS | _COPIES
# Of images: each feature is a plane of its own.
_PLANEWISE = {
    f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp") for dims in (1, 2, 3)
} | {"interpolate"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_SIZES = {"shape", "size", "numel", "nelement", "len"}
# What may be asked of a tensor without looking at its features or their number.
_HARMLESS = {
    *("dtype", "device", "layout", "requires_grad", "is_meta", "ndim", "is_nested", "is_sparse", "is_quantized"),
    *("is_cuda", "is_mps", "is_xpu", "is_cpu", "is_leaf", "dim", "ndimension", "is_floating_point", "is_complex"),
    *("is_contiguous", "get_device", "element_size"),
}


def name_of(function: Callable[..., Any]) -> str:
    """`mul` of `torch.Tensor.__imul__` is `imul`; of an attribute its own name."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return str(name).strip("_")


def is_harmless(name: str) -> bool:
    return name in _HARMLESS


def why_not(
    name: str,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    flowing: list[Tensor],
    others: list[Tensor],
    dim: int,
) -> str | None:
    """Why an operation on flowing tensors, and others, needs their features whole; None if it does not."""
    if name in _DROPOUTS:
        probability = options.get("p", arguments[1] if len(arguments) > 1 else 0.5)
        return None if probability == 0 else f"its output meets {name} with p={probability:g}"
    if name in _SIZES:
        return "the size of its output is asked for"
    if name not in _ELEMENTWISE and not (dim == 1 and name in _PLANEWISE):
        return f"its output goes into {name}"
    # A number may meet all features; if it were trained, each rank would have a part of its gradient only.
    if any(other.dim() or other.requires_grad for other in others):
        return f"its output meets a tensor that is whole, in {name}"
    if len({tensor.shape for tensor in flowing}) > 1:
        return f"its output meets one of another shape, in {name}"
    return None
