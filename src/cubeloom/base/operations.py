"""torch's functions by name: those that read no values, those that are random, those that change a tensor in place.

`mul`, `__mul__`, `__rmul__`, `__imul__` and `mul_` are one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_BINARY = {
    *("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
}
_UNARY = {"neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem"}
# These read properties of a tensor and not its values, or create no tensor.
_METADATA = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "layout"),
    *("dtype", "device", "requires_grad", "grad_fn", "grad", "is_leaf", "names", "itemsize", "element_size", "nbytes"),
    *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_tensor", "is_signed", "get_device", "is_inference"),
    *("is_pinned", "is_storage", "result_type", "promote_types", "can_cast", "broadcast_shapes", "_version", "_base"),
    *("__len__", "__hash__", "__repr__", "__str__", "__format__", "retain_grad", "set_grad_enabled", "output_nr"),
    *("get_default_dtype", "set_default_dtype", "is_grad_enabled", "has_names", "retains_grad", "get_default_device"),
}
_VALUES = {
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"),
    *("__contains__", "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "unique", "unique_consecutive"),
    *("masked_select", "bincount", "backward", "is_same_size"),
}
_RANDOM = {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "multinomial"),
    *("normal", "poisson", "uniform", "exponential", "random", "cauchy", "log_normal", "geometric", "gumbel_softmax"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices", "binomial"),
    *("fractional_max_pool3d_with_indices",),
}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_DROPOUTS |= {"feature_dropout", "native_dropout"}
_ALIASES = {
    alias: name
    for name, aliases in {
        "abs": ("absolute",),
        "acos": ("arccos",),
        "neg": ("negative",),
        "mul": ("multiply",),
        "div": ("divide", "true_divide", "truediv"),
        "sub": ("subtract",),
        "floor_divide": ("floordiv",),
        "remainder": ("mod",),
        "positive": ("pos",),
        "bitwise_not": ("invert",),
        "bitwise_and": ("and",),
        "bitwise_or": ("or",),
        "bitwise_xor": ("xor",),
        "bitwise_left_shift": ("lshift",),
        "bitwise_right_shift": ("rshift",),
        "clamp": ("clip",),
        "cat": ("concat", "concatenate"),
        "movedim": ("moveaxis",),
        "transpose": ("swapaxes", "swapdims"),
        "matmul": ("linalg_matmul", "mm"),
        "trunc": ("fix",),
        "unbind": ("__iter__",),
        "softmax": ("special_softmax",),
        "log_softmax": ("special_log_softmax",),
        "logsumexp": ("special_logsumexp",),
        "sigmoid": ("special_expit", "expit"),
        "gt": ("greater",),
        "ge": ("greater_equal",),
        "lt": ("less",),
        "le": ("less_equal",),
        "ne": ("not_equal",),
    }.items()
    for alias in aliases
}

_POINTWISE = """
abs acos acosh add addcdiv addcmul angle arctan2 asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min complex conj conj_physical copy copysign cos cosh
deg2rad digamma div eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac ge gt heaviside hypot
i0 imag isclose isfinite isinf isnan isneginf isposinf isreal ldexp le lerp lgamma log log10 log1p log2 logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul nan_to_num ne neg nextafter polar
positive pow rad2deg real reciprocal remainder resolve_conj resolve_neg round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh
sqrt square sub tan tanh trunc where xlogy
celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 rrelu selu silu softplus
softshrink softsign tanhshrink threshold
alias bfloat16 bool byte char clone contiguous cpu cuda data detach double float half int long requires_grad short to type
type_as empty_like full_like ones_like zeros_like fill fill_diagonal zero
dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout
"""
# That compute each number of their result from the numbers at its place.
POINTWISE = set(_POINTWISE.split()) - {"fill_diagonal"}


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    metadata: bool = False
    in_place: bool = False
    iterates: bool = False  # returns an iterator over a tensor


def operation_of(function: Callable[..., Any]) -> Operation:
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", name)
        return Operation(attribute, attribute in _METADATA) if name == "__get__" else Operation(f"{attribute} = ")
    if name.startswith("__") and name.endswith("__"):
        return _special(name)
    plain = name.strip("_")
    in_place = name.endswith("_") or plain == "setitem"
    # `requires_grad` is a property; `requires_grad_` counts as a copy as far as layouts are concerned.
    if not in_place and (plain in _METADATA or name in _METADATA):
        return Operation(plain, metadata=True)
    return Operation(_ALIASES.get(plain, plain), in_place=in_place)


def _special(name: str) -> Operation:
    plain = name.strip("_")
    if name in _METADATA:
        return Operation(name, metadata=True)
    for prefix in ("r", "i"):
        if plain.startswith(prefix) and plain[1:] in _BINARY and plain not in _BINARY | _UNARY:
            reversed_matmul = plain == "rmatmul"
            rest = "rmatmul" if reversed_matmul else _ALIASES.get(plain[1:], plain[1:])
            return Operation(rest, in_place=prefix == "i")
    if plain in _BINARY | _UNARY:
        return Operation(_ALIASES.get(plain, plain), in_place=plain == "setitem")
    return Operation(_ALIASES.get(name, name), iterates=name == "__iter__")


def needs_values(operation: Operation, tensors: list[Tensor]) -> bool:
    """Whether the operation reads values; also if the size of a result depends on them."""
    if operation.name in ("getitem", "where"):
        alone = operation.name == "where" and len(tensors) == 1
        return alone or any(is_mask(tensor) for tensor in tensors[1:] if operation.name == "getitem")
    return operation.name in _VALUES


def is_mask(tensor: Tensor) -> bool:
    """Whether the tensor is a mask when used as an index: all one-byte integers are."""
    return tensor.dtype in (torch.bool, torch.uint8)


def is_dropout(name: str) -> bool:
    return name in _DROPOUTS


def is_random(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it draws random numbers, which each rank would draw separately."""
    name = operation.name
    if name in _RANDOM:
        return True
    if name == "scaled_dot_product_attention":
        return bool(_given(args, kwargs, 4, "dropout_p", 0.0))
    if name == "multi_head_attention_forward":
        return bool(_given(args, kwargs, 10, "dropout_p", 0.0)) and bool(_given(args, kwargs, 13, "training", True))
    training = 2 if name != "rrelu" else 3
    if name == "rrelu":
        return bool(_given(args, kwargs, training, "training", False))
    if name not in _DROPOUTS:
        return False
    chance = _given(args, kwargs, 1, "p", 0.5)
    default = name not in ("alpha_dropout", "feature_alpha_dropout")
    trains = _given(args, kwargs, training, "training", kwargs.get("train", default))
    return bool(trains) and chance != 0


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def parameters_in(tensors: list[Any]) -> list[nn.Parameter]:
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
