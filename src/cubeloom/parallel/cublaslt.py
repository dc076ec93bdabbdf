"""GPU matmuls that apply GELU, or multiply with its derivative, before they write their output: cuBLASLt's epilogues.

torch has no call for the ones that keep what a backward needs. We use the library that torch has loaded, through its C
interface; the names and numbers below are those of its header. cuBLASLt's matrices are column-major, so our row-major
ones are its transposed ones: `out[m, n] = x[m, k] · W` is `outᵀ[n, m] = Wᵀ · xᵀ`.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

ALIGNED = 256  # bytes; the alignment that kernels are chosen for by default
WHOLE = 8  # row lengths are multiples of this, so that each row starts where kernels may use vector loads
ROOM = 32 << 20  # bytes of workspace that a kernel may use
# With fewer rows the matmul with GELU's derivative takes longer than a plain one followed by an element-wise kernel: on
# an H200 up to a fifth longer with 1,024 rows, a third less with 16,384 (docs/performance.md).
MANY_ROWS = 2048

BFLOAT16, FLOAT32 = 14, 0  # cudaDataType
COMPUTE_32F = 68  # cublasComputeType
GELU_AUX_BIAS, DGELU = 164, 192  # cublasLtEpilogue
# cublasLtMatmulDescAttributes
TRANSA, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD, AUX_DATA_TYPE, BIAS_DATA_TYPE = 3, 7, 8, 11, 12, 22, 26
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes


@cache
def available() -> bool:
    """Whether this process has loaded the library."""
    try:
        _library()
    except OSError:
        return False
    return True


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor] | None:
    """`gelu(x · weightᵀ + bias)`, and the input of GELU; None if there is no kernel for it.

    `[m, k]`, `[n, k]` and `[n]`, in bfloat16, to twice `[m, n]`.
    """
    after, before = (x.new_empty(len(x), len(weight)) for _ in range(2))
    return (after, before) if _multiply(GELU_AUX_BIAS, x, weight, after, before, bias) else None


def gelu_gradient(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor | None:
    """`gradient · weight` times the derivative of GELU at `before`; None if no kernel is worth using.

    `[m, k]`, `[k, n]` and `[m, n]`, in bfloat16, to `[m, n]`.
    """
    if len(gradient) < MANY_ROWS:
        return None
    out = torch.empty_like(before)
    return out if _multiply(DGELU, gradient, weight, out, before) else None


def _multiply(epilogue: int, x: Tensor, weight: Tensor, out: Tensor, aux: Tensor, bias: Tensor | None = None) -> bool:
    """Launch the kernel; return whether there is one."""
    tensors = [x, weight, out, aux, *([] if bias is None else [bias])]
    if not (available() and all(_fits(each) for each in tensors)):
        return False
    with torch.cuda.device(x.device):
        plan = _plan(x.device.index, epilogue, len(x), x.shape[1], out.shape[1])
        if plan is None:
            return False
        plan(x, weight, out, aux, bias)
    return True


def _fits(tensor: Tensor) -> bool:
    if not (tensor.is_cuda and tensor.dtype is torch.bfloat16 and tensor.is_contiguous()):
        return False
    return tensor.data_ptr() % ALIGNED == 0 and tensor.shape[-1] % WHOLE == 0


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult: a kernel, and what it needs."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass
class _Plan:
    """A matmul of one shape. Its operation stores addresses, so only one thread may use it at a time."""

    handle: c_void_p
    operation: c_void_p
    weight: c_void_p  # layouts
    x: c_void_p
    out: c_void_p
    choice: _Choice
    lock: Any = field(default_factory=Lock)

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, aux: Tensor, bias: Tensor | None) -> None:
        room = torch.empty(self.choice.workspace, dtype=torch.uint8, device=x.device)
        one, zero = c_float(1), c_float(0)
        with self.lock:
            _describe(self.operation, AUX_POINTER, c_void_p(aux.data_ptr()))
            if bias is not None:
                _describe(self.operation, BIAS_POINTER, c_void_p(bias.data_ptr()))
            _call(
                "cublasLtMatmul",
                self.handle,
                self.operation,
                byref(one),
                c_void_p(weight.data_ptr()),
                self.weight,
                c_void_p(x.data_ptr()),
                self.x,
                byref(zero),
                c_void_p(out.data_ptr()),
                self.out,
                c_void_p(out.data_ptr()),
                self.out,
                byref(self.choice.algo),
                c_void_p(room.data_ptr()),
                c_size_t(len(room)),
                c_void_p(torch.cuda.current_stream().cuda_stream),
            )


@cache
def _plan(device: int, epilogue: int, m: int, k: int, n: int) -> _Plan | None:
    """For `out[m, n]` from `x[m, k]` and a weight, `[n, k]` in a forward and `[k, n]` in a backward; None without a
    kernel.
    """
    forward = epilogue == GELU_AUX_BIAS
    operation = _made("cublasLtMatmulDescCreate", c_int(COMPUTE_32F), c_int(FLOAT32))
    _describe(operation, TRANSA, c_int(forward))
    _describe(operation, EPILOGUE, c_int(epilogue))
    _describe(operation, AUX_DATA_TYPE, c_int(BFLOAT16))
    _describe(operation, AUX_LD, c_int64(n))
    if forward:
        _describe(operation, BIAS_DATA_TYPE, c_int(BFLOAT16))
    weight, x, out = _layout(k, n) if forward else _layout(n, k), _layout(k, m), _layout(n, m)
    wish = _made("cublasLtMatmulPreferenceCreate")
    most = c_uint64(ROOM)
    _call("cublasLtMatmulPreferenceSetAttribute", wish, c_int(MAX_WORKSPACE_BYTES), byref(most), c_size_t(sizeof(most)))
    choice, found = _Choice(), c_int()
    try:
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(_handle(device), operation, weight, x, out, out, wish, c_int(1), byref(choice), byref(found)),
        )
    except OSError:
        return None
    if not found.value or (epilogue == DGELU and choice.waves > 1):
        # With few multiprocessors, as on a part of a GPU, the library implements DGELU as a plain matmul and a second
        # kernel, twice as slow as ours. A kernel that does both runs in a single wave.
        return None
    return _Plan(_handle(device), operation, weight, x, out, choice)


def _layout(rows: int, columns: int) -> c_void_p:
    return _made("cublasLtMatrixLayoutCreate", c_int(BFLOAT16), c_uint64(rows), c_uint64(columns), c_int64(rows))


def _describe(operation: c_void_p, attribute: int, value: Any) -> None:
    _call("cublasLtMatmulDescSetAttribute", operation, c_int(attribute), byref(value), c_size_t(sizeof(value)))


def _made(function: str, *arguments: object) -> c_void_p:
    """An object created by the library. It is never freed, like plans: there are few."""
    found = c_void_p()
    _call(function, byref(found), *arguments)
    return found


@cache
def _handle(device: int) -> c_void_p:
    return _made("cublasLtCreate")


def _call(function: str, *arguments: object) -> None:
    if code := getattr(_library(), function)(*arguments):
        raise OSError(f"{function}: cuBLASLt says {code}")


@cache
def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise OSError("this torch knows no CUDA")
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
