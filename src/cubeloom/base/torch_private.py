"""All that Cubeloom uses of torch without torch having promised it: names with an underscore, and what hangs on them.

Each is a small function that says what we rely on, and has a test in tests/test_torch_private.py: a torch that changes one of
them fails there. `tests/house_rules.py` keeps such names out of every other module. Works with torch 2.11 to 2.13.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
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

# Families of modules that have no public name.
AnyConvolution = _ConvNd
"""Of any dimension, transposed or not."""
AnyBatchNorm = _BatchNorm
AnyLoss = _Loss

COMPILER = "torch._dynamo"
"""A module that torch imports when the first distributed tensor is made, which takes a second."""

SavedTensorHooks = tuple[Callable[..., Any], Callable[..., Any]]


# --- the backward that is running ---


def running_backward() -> int:
    """Its number, which grows with each that begins; -1 where none is running in this thread."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    return running_backward() != -1


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Have this called at the end of the backward that is running in this thread. One that fails lets go of it, uncalled."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def sequence_number(node: Node) -> int:
    """Among the nodes that are ready autograd runs the one with the highest."""
    return node._sequence_nr()


def set_sequence_number(node: Node, number: int) -> None:
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


def function_of(node: BackwardCFunction) -> type:
    """The autograd function that this is the backward of."""
    found: type = node._forward_cls  # type: ignore[attr-defined]
    return found


# --- what torch keeps for a thread ---


def take_off_saved_tensor_hooks() -> tuple[SavedTensorHooks, ...]:
    """The hooks of `saved_tensors_hooks` blocks that this thread is in, innermost first; it then has none."""
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
    """Those that this thread is in, innermost first; it then is in none."""
    return tuple(_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack()))


def put_on_dispatch_modes(modes: tuple[TorchDispatchMode, ...]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


def function_modes() -> tuple[TorchFunctionMode, ...]:
    """Modes of functions that this thread is in, outermost first."""
    return tuple(_get_current_function_mode_stack())


# --- the compiler ---


def compile_part_by_part(join: Any) -> None:
    """Have the compiler write each tensor that this operator joins, of `(tensors, dim)`, where it belongs in the joined one."""
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings, register_lowering

    def lowered(tensors: Any, dim: int) -> Any:
        return ir.TensorBox(ir.ConcatKernel.create(list(tensors), dim))

    if join not in lowerings:
        register_lowering(join, type_promotion_kind=None)(lowered)


# --- tensors and modules ---


def version(tensor: Tensor) -> int:
    """Grows with each change in place that autograd sees."""
    return tensor._version


def storage_identity(tensor: Tensor | torch.UntypedStorage) -> int:
    """The same for tensors of one memory, also where it holds no values; another one may have it once that is gone."""
    storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
    return int(storage._cdata)


def device_of(tensor: Tensor) -> torch.device:
    """Also of a fake tensor, whose `device` is an operation of its own, which takes as long as any."""
    return getattr(tensor, "fake_device", None) or tensor.device


def same_values(tensor: Tensor) -> Tensor:
    """The same memory and shape, and no view: autograd lets it be changed in place."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """One for each tensor, in few kernels for all of them."""
    return list(torch._foreach_norm(tensors, dtype=dtype))


def assert_async(true: Tensor, message: str) -> None:
    """Have a GPU stop if this is false, without waiting for it."""
    torch._assert_async(true, message)


def zero(tensors: list[Tensor]) -> None:
    """In few kernels for all of them."""
    torch._foreach_zero_(tensors)


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def take_off_backward_hooks(module: nn.Module) -> None:
    """The dictionaries that had them are as they were: put back among the module's attributes, they are on again."""
    module._backward_hooks = OrderedDict()
    module._backward_pre_hooks = OrderedDict()


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Its own, by name: what is put there is the module's."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers


# --- distributed tensors ---


def local_tensor(tensor: Tensor) -> Tensor:
    """The block that this rank holds of a DTensor, without a node of autograd: `to_local` makes one, and takes 20 us."""
    return tensor._local_tensor  # type: ignore[attr-defined]


plain_functions = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a subclass of DTensor: results are not made members of the subclass."""


def is_elementwise(operation: Any) -> bool:
    """Whether an operation that a tensor subclass is asked for computes each number of its result from one of each tensor."""
    return torch.Tag.pointwise in operation.tags or operation.overloadpacket in _COPIES


_COPIES = {
    *(torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten.alias, torch.ops.aten._to_copy, torch.ops.aten.copy_),
    *(torch.ops.aten.zeros_like, torch.ops.aten.ones_like, torch.ops.aten.empty_like, torch.ops.aten.fill_),
    *(torch.ops.aten.zero_, torch.ops.aten.full_like, torch.ops.aten.rand_like, torch.ops.aten.randn_like),
}


def changes_its_input(operation: Any) -> bool:
    """Whether it gives back the tensor that it was called with: `add_`."""
    first = operation._schema.arguments[0].alias_info if operation._schema.arguments else None
    return first is not None and first.is_write


def distributed_like(local: Tensor, like: Tensor, kind: type | None = None) -> Any:
    """A DTensor of this block, laid out as another one is: `from_local` checks that anew, and takes 90 us."""
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
    """No operation of the group may last longer. gloo's reduce-scatter heeds this alone, and not the limit of a `wait`."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=seconds), group)


def forget_layouts() -> None:
    """DTensor's caches remember the meshes of groups that are gone, and keep their threads alive."""
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", gc.collect)()  # torch 2.11 may not have it


# --- tensors without values ---

real_tensors = unset_fake_temporarily
"""While it is entered, tensors that are made have values, or are on the meta device, also inside a `FakeTensorMode`."""

# --- FLOPs ---

_ATTENTION, _GEMM = torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.aten.addmm
# Of what torch's own table lacks: attention on a CPU, and products that add in place or have an activation behind them.
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
    """Multiplications and additions of the products, convolutions and attention that torch computes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        count = _FLOPS.get(getattr(function, "_overloadpacket", function))
        if count is not None:
            self.total += int(count(*args, **(kwargs or {}), out_val=found))
        return found


# --- the elastic agent ---


@contextmanager
def watched_ranks(finished: Callable[[str], Any], ended: Callable[[int, Mapping[int, int]], None]) -> Iterator[None]:
    """While it is entered, ranks that torch's agent starts wait for each other at what `finished` makes of their start method.

    Whenever the agent sees that ranks have failed, `ended` is told how many there are, and the exit codes of those that ended.
    """
    from torch.distributed.elastic import multiprocessing as processes

    plain = processes.MultiprocessContext

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._worker_finished_event = finished(self.start_method)

        def _poll(self) -> Any:
            assert self._pc is not None
            # Those that have ended before the agent ends the rest, and whichever it sees first.
            codes = {rank: process.exitcode for rank, process in enumerate(self._pc.processes)}
            found = super()._poll()
            if found is not None:
                codes |= {rank: failure.exitcode for rank, failure in found.failures.items()}
                ended(self.nprocs, {rank: code for rank, code in codes.items() if code is not None})
            return found

    # The agent asks its module for the class of its ranks, and nobody else.
    processes.MultiprocessContext = Watched  # type: ignore[misc]
    try:
        yield
    finally:
        processes.MultiprocessContext = plain  # type: ignore[misc]


def without_subclasses() -> AbstractContextManager[None]:
    """Functions of tensors of a subclass are those of plain tensors; modes of functions still see them."""
    return torch._C.DisableTorchFunctionSubclass()
