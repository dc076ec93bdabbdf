"""All use of torch's private interfaces: names with an underscore, and what depends on them.

Each is a small function that says what we rely on, and has a test in tests/test_torch_private.py, which fails if torch
changes it. `tests/house_rules.py` keeps such names out of every other module. Works with torch 2.11 to 2.13.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, overrides
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.loss import _Loss
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils.flop_counter import flop_registry

from cubeloom.base.functions_of_torch import every_head

# Classes of modules without a public name.
AnyConvolution = _ConvNd
"""Convolutions of any dimension, transposed or not."""
AnyBatchNorm = _BatchNorm
AnyLoss = _Loss

COMPILER = "torch._dynamo"
"""A module that torch imports when the first distributed tensor is created, which takes a second."""
LAYOUT_CACHES = "torch.distributed.tensor.debug"
"""A module that `forget_layouts` imports."""

Called = TypeVar("Called", bound=Callable[..., Any])
SavedTensorHooks = tuple[Callable[..., Any], Callable[..., Any]]


# --- the current backward ---


def running_backward() -> int:
    """The number of the current backward of this thread, which grows with each; -1 if there is none."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    return running_backward() != -1


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call this at the end of this thread's current backward. A backward that fails drops it without calling it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def sequence_number(node: Node) -> int:
    """Of the nodes that are ready, autograd runs the one with the highest number."""
    return node._sequence_nr()


def set_sequence_number(node: Node, number: int) -> None:
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


def function_of(node: BackwardCFunction) -> type:
    """The autograd function of this backward node."""
    found: type = node._forward_cls  # type: ignore[attr-defined]
    return found


# --- state that torch keeps per thread ---


def take_off_saved_tensor_hooks() -> tuple[SavedTensorHooks, ...]:
    """Remove and return the hooks of the `saved_tensors_hooks` blocks that this thread is in, innermost first."""
    autograd = torch._C._autograd
    found = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        autograd._pop_saved_tensors_default_hooks()
    return tuple(found)


def put_on_saved_tensor_hooks(hooks: tuple[SavedTensorHooks, ...]) -> None:
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def take_off_dispatch_modes() -> tuple[TorchDispatchMode, ...]:
    """Remove and return the dispatch modes that this thread is in, innermost first."""
    return tuple(_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack()))


def put_on_dispatch_modes(modes: tuple[TorchDispatchMode, ...]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


def function_modes() -> tuple[TorchFunctionMode, ...]:
    """The function modes that this thread is in, outermost first."""
    return tuple(_get_current_function_mode_stack())


def take_off_function_modes() -> tuple[TorchFunctionMode, ...]:
    """Leave them, innermost first."""
    return tuple(overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack()))


def put_on_function_modes(modes: tuple[TorchFunctionMode, ...]) -> None:
    for mode in reversed(modes):
        overrides._push_mode(mode)


# --- the compiler ---


def left_to_python(function: Called) -> Called:
    """The compiler calls it, and does not look into it. Without importing the compiler, as `torch.compiler.disable` does."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def constant_to_compiler(function: Called) -> Called:
    """The compiler calls it once and takes its result as a constant. Without importing the compiler, which takes half a
    second, as `torch.compiler.assume_constant_result` does.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compile_part_by_part(join: Any) -> None:
    """Make the compiler write each tensor that this operator, of `(tensors, dim)`, joins directly into the result."""
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings, register_lowering

    def lowered(tensors: Any, dim: int) -> Any:
        return ir.TensorBox(ir.ConcatKernel.create(list(tensors), dim))

    if join not in lowerings:
        register_lowering(join, type_promotion_kind=None)(lowered)


# --- tensors and modules ---


def version(tensor: Tensor) -> int:
    """Grows with each in-place change that autograd sees."""
    return tensor._version


def storage_identity(tensor: Tensor | torch.UntypedStorage) -> int:
    """Equal for tensors that share memory, even without values. It may be reused after the storage is gone."""
    storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
    return int(storage._cdata)


def device_of(tensor: Tensor) -> torch.device:
    """Also for a fake tensor, whose `device` attribute is as slow as an operation."""
    return getattr(tensor, "fake_device", None) or tensor.device


def same_values(tensor: Tensor) -> Tensor:
    """The same memory and shape, but not a view: autograd allows in-place changes."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)


def norms_of(tensors: list[Tensor], dtype: torch.dtype | None = None, order: float = 2) -> list[Tensor]:
    """The norm of each tensor, in few kernels for all of them."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def assert_async(true: Tensor, message: str) -> None:
    """Stop the GPU if this is false, without waiting for it."""
    torch._assert_async(true, message)


def zero(tensors: list[Tensor]) -> None:
    """Zero all of them in few kernels."""
    torch._foreach_zero_(tensors)


def add_to_each(tensors: list[Tensor], number: Tensor | float) -> None:
    """Add the same number to all of them, in few kernels."""
    torch._foreach_add_(tensors, number)


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def carry_forward_hooks(source: nn.Module, target: nn.Module) -> None:
    """Hooks before and after its forward are the other's, too: a handle removes one from both."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        for kind in ("", "_with_kwargs", "_always_called"):
            if hasattr(source, name + kind):
                setattr(target, name + kind, getattr(source, name + kind))


def take_off_backward_hooks(module: nn.Module) -> None:
    """Replaces the dictionaries of hooks. Restoring the previous ones as attributes restores the hooks."""
    module._backward_hooks = OrderedDict()
    module._backward_pre_hooks = OrderedDict()


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Its own parameters by name. Assigning to this dictionary sets the module's parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers


# --- distributed tensors ---


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's block of a DTensor, without an autograd node: `to_local` creates one, and takes 20 us."""
    return tensor._local_tensor  # type: ignore[attr-defined]


plain_functions = torch._C._disabled_torch_function_impl
"""For `__torch_function__` of a DTensor subclass: results do not become members of the subclass."""


DISPATCHES_SUBCLASSES = tuple(int(each) for each in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether `__torch_dispatch__` of a subclass of DTensor is called. Before, torch took all for DTensors, in C++."""


def changes_its_input(operation: Any) -> bool:
    """Whether it changes and returns its first argument, like `add_`."""
    first = operation._schema.arguments[0].alias_info if operation._schema.arguments else None
    return first is not None and first.is_write


def distributed_like(local: Tensor, like: Tensor, kind: type | None = None) -> Any:
    """A DTensor of this block, with the layout of another one: `from_local` repeats its checks, and takes 90 us."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    local = _with_storage_of_its_own(local)
    spec: DTensorSpec = like._spec  # type: ignore[attr-defined]
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype is not local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(meta.shape, meta.stride, local.dtype))
    return (kind or DTensor)(local, spec, requires_grad=False)


def _with_storage_of_its_own(local: Tensor) -> Tensor:
    """The same memory as the begin of a storage: torch cannot deep-copy a DTensor whose block begins elsewhere in one."""
    if local.storage_offset() == 0 or isinstance(local, FakeTensor) or not local.is_contiguous():
        return local
    begin = local.storage_offset() * local.itemsize
    storage = local.untyped_storage()[begin : begin + local.numel() * local.itemsize]
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(storage, 0, local.shape)  # type: ignore[call-overload]


def limit_waits(group: Any, seconds: float) -> None:
    """The timeout of all operations of the group. gloo's reduce-scatter obeys only this, and not the timeout of a
    `wait`.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=seconds), group)


def forget_layouts() -> None:
    """DTensor's caches refer to the meshes of groups that are gone, and keep their threads alive."""
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", gc.collect)()  # may be missing in torch 2.11


# --- tensors without values ---

real_tensors = unset_fake_temporarily
"""While it is entered, new tensors have values, or are on the meta device, also inside a `FakeTensorMode`."""

# --- FLOPs ---

_ATTENTION, _GEMM = torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.aten.addmm
# What torch's own table lacks: attention on a CPU, and matmuls that add in place or have a fused activation.
_FLOPS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATTENTION],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
    torch.ops.aten._addmm_activation: flop_registry[_GEMM],
    torch.ops.aten.addmm_: flop_registry[_GEMM],
    torch.ops.aten.baddbmm_: flop_registry[torch.ops.aten.baddbmm],
}


class FlopCounter(TorchDispatchMode):
    """The FLOPs of the matmuls, convolutions and attention that torch computes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        count = _FLOPS.get(getattr(function, "_overloadpacket", function))
        if count is not None:
            given = every_head(args) if "scaled_dot_product" in str(function) else args
            self.total += int(count(*given, **(kwargs or {}), out_val=found))
        return found


# --- functions that modes of torch see ---


def undispatched(function: FunctionType) -> FunctionType:
    """One of torch.nn.functional that does not ask whether a mode wants to handle it: a mode then sees what it calls."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    own = function.__globals__ | {name: lambda *_: False for name in names}
    made = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# --- the elastic agent ---


@contextmanager
def watched_ranks(finished: Callable[[str], Any], ended: Callable[[int, Mapping[int, int]], None]) -> Iterator[None]:
    """While it is entered, ranks that torch's agent starts wait for each other at the gate that `finished` returns.

    When the agent sees that ranks have failed, `ended` is called with their number, and the exit codes of those that
    ended.
    """
    from torch.distributed.elastic import multiprocessing as processes

    plain = processes.MultiprocessContext

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._worker_finished_event = finished(self.start_method)

        def _poll(self) -> Any:
            assert self._pc is not None
            # Ranks that ended before the agent ends the rest, and the one it sees first.
            codes = {rank: process.exitcode for rank, process in enumerate(self._pc.processes)}
            found = super()._poll()
            if found is not None:
                codes |= {rank: failure.exitcode for rank, failure in found.failures.items()}
                ended(self.nprocs, {rank: code for rank, code in codes.items() if code is not None})
            return found

    # Only the agent asks its module for the class of its ranks.
    processes.MultiprocessContext = Watched  # type: ignore[misc]
    try:
        yield
    finally:
        processes.MultiprocessContext = plain  # type: ignore[misc]


def without_subclasses() -> AbstractContextManager[None]:
    """Functions of subclass tensors behave as for plain tensors; function modes still see them."""
    return torch._C.DisableTorchFunctionSubclass()


def without_values(kind: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of this class that only looks like one: what reaches its memory goes through its `__torch_dispatch__`."""
    return Tensor._make_wrapper_subclass(kind, torch.Size(shape), dtype=dtype, device=device)


def source_of_scripted(function: Any) -> Any:
    """The Python function that `torch.jit.script` was given; None if there is none."""
    return getattr(function, "_torchdynamo_inline", None)


def scaled_product(
    left: Tensor, right: Tensor, factors: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool
) -> Tensor:
    """`left · rightᵀ` of FP8 matrices, each times its factor. `fast`: sums may have fewer bits."""
    by_columns = right.contiguous().t()
    found: Tensor = torch._scaled_mm(left.contiguous(), by_columns, *factors, out_dtype=dtype, use_fast_accum=fast)
    return found
