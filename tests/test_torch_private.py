"""What we rely on of torch without torch having promised it. A new torch that changes some of it should fail here."""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import os
import signal
import weakref
from collections.abc import Mapping
from types import FunctionType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cubeloom.base import functions_of_torch
from cubeloom.base import torch_private as private
from cubeloom.base.parts import parts_of
from cubeloom.comm import world
from cubeloom.launch import RankPool, rendezvous
from cubeloom.launch.gate import Gate


class Noting(torch.autograd.Function):
    """Calls something in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Any) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradient, None


def backward_of(note: Any) -> None:
    Noting.apply(torch.ones(1, requires_grad=True), note).sum().backward()


def test_a_backward_has_a_number_that_grows() -> None:
    numbers: list[int] = []
    for _ in range(2):
        backward_of(lambda: numbers.append(private.running_backward()))
    assert private.running_backward() == -1
    assert -1 < numbers[0] < numbers[1]


def test_modes_of_functions_are_known() -> None:
    with TorchFunctionMode() as outer, TorchFunctionMode() as inner:
        assert private.function_modes() == (outer, inner)
    assert private.function_modes() == ()


def test_we_know_whether_we_are_in_a_backward() -> None:
    seen: list[bool] = [private.in_backward()]
    backward_of(lambda: seen.append(private.in_backward()))
    assert seen == [False, True]


def test_we_hear_of_the_end_of_a_backward_after_its_last_node() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    early = Noting.apply(x, lambda: order.append("last node"))
    late = Noting.apply(early, lambda: private.when_backward_ends(lambda: order.append("end")))
    late.sum().backward()
    assert order == ["last node", "end"]


def test_a_backward_that_fails_lets_go_of_who_waits_for_its_end() -> None:
    class Callback:
        def __call__(self) -> None:
            raise AssertionError("the backward did not end")

    waiting: list[weakref.ref[Callback]] = []

    def fail(_: Tensor) -> None:
        callback = Callback()
        waiting.append(weakref.ref(callback))
        private.when_backward_ends(callback)
        raise RuntimeError("on purpose")

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        y.sum().backward()
    assert waiting[0]() is None


def test_autograd_runs_the_ready_node_with_the_highest_number_first() -> None:
    def order(swapped: bool) -> list[str]:
        found: list[str] = []
        x = torch.ones(1, requires_grad=True)
        first = Noting.apply(x, lambda: found.append("first"))
        second = Noting.apply(x, lambda: found.append("second"))
        number, higher = private.sequence_number(first.grad_fn), private.sequence_number(second.grad_fn)
        assert number < higher
        if swapped:
            private.set_sequence_number(second.grad_fn, number)
            private.set_sequence_number(first.grad_fn, higher)
        torch.autograd.backward([first, second], [torch.ones(1)] * 2)
        return found

    assert order(swapped=False) == ["second", "first"]
    assert order(swapped=True) == ["first", "second"]


def test_hooks_of_saved_tensors_are_taken_off_and_put_on_again() -> None:
    packed: list[str] = []

    def hooks(name: str) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            packed.append(name)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def save() -> None:
        torch.ones(1, requires_grad=True).exp()

    with hooks("outer"), hooks("inner"):
        found = private.take_off_saved_tensor_hooks()
        save()
        assert (len(found), packed) == (2, [])
        private.put_on_saved_tensor_hooks(found)
        save()
        assert packed == ["inner"]
        private.put_on_saved_tensor_hooks((private.take_off_saved_tensor_hooks()[1],))
        save()
        assert packed == ["inner", "outer"]
        private.put_on_saved_tensor_hooks((found[0],))  # as the blocks expect


class Counting(private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_are_taken_off_and_put_on_again_and_see_the_backward() -> None:
    x = torch.ones(1, requires_grad=True)
    with Counting() as outer, Counting() as inner:
        found = private.take_off_dispatch_modes()
        y = x.exp()
        assert found == (inner, outer) and outer.seen == inner.seen == 0
        private.put_on_dispatch_modes(found)
        y.backward()
    assert outer.seen and inner.seen


def test_a_version_counts_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = private.version(tensor)
    tensor.view(-1).add_(1)
    assert private.version(tensor) == before + 1


def test_tensors_of_one_memory_have_one_identity_without_values_too() -> None:
    for mode in (None, private.FakeTensorMode()):
        with mode or torch.no_grad():
            tensor, other = torch.zeros(2, 2), torch.zeros(2, 2)
            identity = private.storage_identity(tensor)
            assert identity == private.storage_identity(tensor[1]) == private.storage_identity(tensor.untyped_storage())
            assert identity != private.storage_identity(other)


def test_a_backward_knows_its_function() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    node = Same.apply(torch.zeros(2, requires_grad=True)).grad_fn
    assert isinstance(node, BackwardCFunction) and private.function_of(node) is Same
    assert node.apply(torch.ones(2)).tolist() == [1, 1]


def test_fake_tensors_have_shapes_and_devices_and_compute_nothing() -> None:
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        product = torch.empty(10**6, 10**6) @ torch.empty(10**6, 3)
        mixed = product[:2] @ torch.zeros(3, 1)
    assert isinstance(product, private.FakeTensor) and product.shape == (10**6, 3) and mixed.shape == (2, 1)
    assert private.device_of(product) == torch.device("cpu")
    assert private.device_of(torch.zeros(1)) == torch.device("cpu")


def test_the_same_values_are_no_view() -> None:
    x = torch.ones(2, 3, 4, requires_grad=True)
    y = nn.functional.linear(x, torch.ones(5, 4), torch.zeros(5))
    same = private.same_values(y)
    assert same.data_ptr() == y.data_ptr() and not same._is_view()
    same.mul_(2).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 3, 4), 10.0))


def test_many_norms_at_once_in_another_dtype() -> None:
    tensors = [torch.full((4,), 3.0), torch.ones(2, 2)]
    norms = private.norms_of(tensors, torch.float64)
    assert [norm.item() for norm in norms] == [6.0, 2.0] and norms[0].dtype == torch.float64
    assert [norm.item() for norm in private.norms_of(tensors, order=torch.inf)] == [3.0, 1.0]


def test_many_are_zeroed_at_once() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    private.zero(tensors)
    assert all(not tensor.any() for tensor in tensors)


@pytest.mark.parametrize("number", [0.5, torch.tensor(0.5)])
def test_a_number_is_added_to_many_at_once(number: torch.Tensor | float) -> None:
    tensors = [torch.tensor(1.0), torch.tensor(2.0)]
    private.add_to_each(tensors, number)
    assert [tensor.item() for tensor in tensors] == [1.5, 2.5]


def test_backward_hooks_of_a_module_are_seen() -> None:
    assert not private.has_backward_hooks(nn.Linear(2, 2))
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        module = nn.Linear(2, 2)
        getattr(module, register)(lambda *_: None)
        assert private.has_backward_hooks(module)


def test_forward_hooks_are_carried_to_another_module() -> None:
    one, other, seen = nn.Linear(2, 2), nn.Linear(2, 2), list[str]()
    before = one.register_forward_pre_hook(lambda *_: seen.append("before"))
    behind = one.register_forward_hook(lambda *_, **__: seen.append("behind"), with_kwargs=True)
    private.carry_forward_hooks(one, other)
    other(torch.zeros(2))
    before.remove()
    other(torch.zeros(2))
    behind.remove()
    other(torch.zeros(2))
    assert seen == ["before", "behind", "behind"]


def test_modes_of_functions_are_taken_off_and_put_on() -> None:
    class Named(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(self)
            return function(*args, **(kwargs or {}))

    seen = list[Named]()
    with Named() as outer, Named() as inner:
        modes = private.take_off_function_modes()
        torch.zeros(1)
        assert modes[:2] == (inner, outer) and not seen
        private.put_on_function_modes(modes)
        torch.zeros(1)
    assert seen == [inner, outer]


def test_what_is_left_to_python_may_raise() -> None:
    @private.left_to_python
    def refuse() -> None:
        raise LookupError("plainly")

    def function(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            refuse()
        return x + 1

    assert function(torch.zeros(1)) == 1
    with pytest.raises(LookupError, match=r"^plainly$"):
        torch.compile(function, backend="eager")(torch.zeros(1))


def test_the_compiler_takes_a_constant_without_looking_into_it() -> None:
    calls = []

    @private.constant_to_compiler
    def known() -> bool:
        calls.append(1)
        return True

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if known() else x

    run = torch.compile(function, backend="eager", fullgraph=True)
    assert [run(torch.zeros(1)).item(), run(torch.zeros(1)).item()] == [1, 1]
    assert len(calls) == 1  # while the compiler looks at `function`


def test_what_is_put_among_parameters_and_buffers_is_the_modules() -> None:
    module = nn.BatchNorm1d(2)
    private.parameters_of(module)["weight"] = weight = nn.Parameter(torch.full((2,), 7.0))
    private.buffers_of(module)["running_mean"] = mean = torch.full((2,), 5.0)
    assert module.weight is weight and module.running_mean is mean
    assert private.parameters_of(nn.Linear(2, 2, bias=False))["bias"] is None


def test_families_of_modules() -> None:
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d):
        assert issubclass(kind, private.AnyConvolution)
    assert issubclass(nn.BatchNorm2d, private.AnyBatchNorm) and issubclass(nn.SyncBatchNorm, private.AnyBatchNorm)
    assert issubclass(nn.CrossEntropyLoss, private.AnyLoss) and issubclass(nn.MSELoss, private.AnyLoss)


def test_trees_of_values() -> None:
    tree = {"a": [1, (2, 3)], "b": None}
    assert private.tree_map(lambda leaf: leaf, tree) == tree
    assert [leaf for leaf in private.tree_leaves(tree) if leaf is not None] == [1, 2, 3]


def test_the_compiler_has_its_name() -> None:
    assert importlib.util.find_spec(private.COMPILER) is not None


def _distributed() -> None:
    mesh = DeviceMesh("cpu", [0])
    local = torch.arange(4.0)
    tensor = DTensor.from_local(local, mesh, [Replicate()])
    assert private.local_tensor(tensor).data_ptr() == local.data_ptr()
    parameter = nn.Parameter(tensor)
    assert private.local_tensor(parameter).data_ptr() == local.data_ptr()
    like = private.distributed_like(torch.ones(4), parameter)
    assert isinstance(like, DTensor) and like.placements == tensor.placements and like.device_mesh == mesh
    wide = private.distributed_like(torch.ones(4, dtype=torch.float64), parameter)
    assert wide.dtype is torch.float64 and (wide + wide).dtype is torch.float64
    parameter.grad = like
    torch.optim.SGD([parameter], lr=1.0).step()
    assert torch.equal(local, torch.arange(4.0) - 1)
    # A block in the middle of a storage keeps its memory, and can be copied.
    bucket = torch.arange(6.0)
    part = private.distributed_like(bucket[2:], parameter)
    assert part.data_ptr() == 0 and torch.equal(copy.deepcopy(part).to_local(), bucket[2:])
    bucket += 1
    assert torch.equal(private.local_tensor(part), bucket[2:])
    private.forget_layouts()


def test_operations_that_a_subclass_is_asked_for_say_what_they_do() -> None:
    aten = torch.ops.aten
    elementwise = (aten.mul.Tensor, aten.detach.default, aten.clone.default, aten._to_copy.default, aten.add_.Tensor)
    assert all(map(functions_of_torch.is_elementwise, (*elementwise, aten.zeros_like.default)))
    assert not any(map(functions_of_torch.is_elementwise, (aten.sum.default, aten.mm.default, aten.t.default)))
    assert private.changes_its_input(aten.add_.Tensor) and private.changes_its_input(aten.copy_.default)
    assert not private.changes_its_input(aten.add.Tensor)


class Plain(Tensor):
    __torch_function__ = private.plain_functions  # type: ignore[assignment]


def test_functions_of_a_subclass_need_not_give_its_members() -> None:
    assert type(torch.ones(2).as_subclass(Plain) + 1) is Tensor


def test_blocks_of_distributed_tensors_are_reached_and_made(ranks: RankPool) -> None:
    ranks.run(1, _distributed)


def test_what_a_function_of_torch_calls_is_seen_by_a_mode() -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    x = torch.rand(3, 4, 5)
    with Names() as names:
        function = functional.local_response_norm
        assert isinstance(function, FunctionType)
        found = private.undispatched(function)(x, 3, beta=0.5)
    assert "avg_pool2d" in names.names and "local_response_norm" not in names.names
    assert torch.equal(found, functional.local_response_norm(x, 3, beta=0.5))


def test_a_recording_group_hears_of_collectives_by_one_of_these_names() -> None:
    """`comm/recording_backend.py` has methods of both."""
    for old, new in (("_allgather_base", "all_gather_single"), ("_reduce_scatter_base", "reduce_scatter_single")):
        assert hasattr(dist.ProcessGroup, old) or hasattr(dist.ProcessGroup, new)


def test_a_store_takes_a_socket_that_we_bound() -> None:
    store = world.host()
    seen = world.visit(store.port)
    seen.set("key", "value")
    assert store.get("key") == b"value"


def _one_is_killed(rank_to_kill: int) -> None:
    if int(os.environ["RANK"]) == rank_to_kill:
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_agent_waits_at_our_gate_and_tells_the_exit_codes() -> None:
    made: list[str] = []
    ended: list[Mapping[int, int]] = []

    def gate(method: str) -> Gate:
        made.append(method)
        return Gate(multiprocessing.get_context(method))

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="private",
        rdzv_backend=rendezvous.BACKEND,
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    with private.watched_ranks(gate, lambda ranks, codes: ended.append(codes)):
        elastic_launch(config, _one_is_killed)(2)  # there is no such rank
        with pytest.raises(Exception, match="SIGKILL"):
            elastic_launch(config, _one_is_killed)(1)
    assert made == ["forkserver"] * 2
    assert ended[-1][1] == -signal.SIGKILL


def stuck(rank: int, port: int, told: Any) -> None:
    """Rank 1 does not come to what rank 0 asks for."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    private.limit_waits(dist.group.WORLD, 1.0)
    if rank == 1:
        told.wait(60)
        os._exit(0)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    try:
        scatter(torch.empty(2), torch.ones(4), async_op=True).wait()
    except RuntimeError as error:
        told.set()
        os._exit(3 if "imed out" in str(error) else 4)


def test_flops_are_counted_of_products_and_of_attention_on_a_cpu() -> None:
    queries = torch.ones(2, 3, 5, 4, requires_grad=True)
    with private.FlopCounter() as counter:
        nn.functional.scaled_dot_product_attention(queries, queries, queries).sum().backward()
    forward = 2 * 2 * (2 * 3) * 5 * 5 * 4
    assert counter.total == forward + 5 * forward // 2  # its backward has five products, of which one is made again
    with private.FlopCounter() as counter:
        torch.zeros(2, 3).addmm_(torch.ones(2, 4), torch.ones(4, 3))
        torch.mm(torch.ones(2, 4), torch.ones(4, 3), out=torch.zeros(2, 3))
        nn.Conv1d(4, 3, 1, bias=False)(torch.ones(1, 4, 2))
        torch.ones(9) * 2
    assert counter.total == 3 * 2 * 2 * 4 * 3


@pytest.mark.slow
def test_a_reduce_scatter_heeds_its_group_s_limit() -> None:
    context = multiprocessing.get_context("spawn")
    store, told = world.host(), context.Event()
    both = [context.Process(target=stuck, args=(rank, store.port, told)) for rank in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(90)
    assert [each.exitcode for each in both] == [3, 0]


def test_backward_hooks_can_be_taken_off_and_put_back() -> None:
    """They are among the module's attributes, and a forward looks for them there."""
    layer, seen = nn.Linear(2, 2), list[int]()
    layer.register_full_backward_hook(lambda *_: seen.append(1))
    layer.register_full_backward_pre_hook(lambda *_: seen.append(2))
    before = dict(vars(layer))
    private.take_off_backward_hooks(layer)
    layer(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == []
    vars(layer).update(before)
    layer(torch.ones(2, requires_grad=True)).sum().backward()
    assert sorted(seen) == [1, 2]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler itself imports
def test_the_compiler_writes_what_is_joined_part_by_part() -> None:
    """The code of a backward has neither our operator nor a cat, and one loop for parts that read the same."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    def loss(fused: Tensor) -> Tensor:
        gate, up = parts_of(fused, (32, 32), -1)
        return (gate.sigmoid() * up).square().sum()

    compiled, eager = (torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    _, (_, backward) = run_fw_bw_and_get_code(lambda: torch.compile(loss)(compiled.requires_grad_()))
    loss(eager.requires_grad_()).backward()
    assert compiled.grad is not None and eager.grad is not None
    torch.testing.assert_close(compiled.grad, eager.grad)
    assert "torch.ops.cubeloom" not in backward and "aten.cat" not in backward
    assert backward.count("reinterpret_tensor(") >= 2  # what the loop writes lies in the joined tensor
    assert backward.count('extern "C"') == 1


def test_functions_of_a_subclass_can_be_those_of_plain_tensors() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("it was asked")

    loud = torch.ones(2, 3).as_subclass(Loud)
    with pytest.raises(AssertionError, match="asked"):
        loud.size()
    with private.without_subclasses():
        assert loud.size() == (2, 3)


class Empty(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ValueError(f"{func}")


def test_a_tensor_without_values_looks_like_one_and_nothing_reads_its_memory() -> None:
    made = private.without_values(Empty, (2, 3), torch.float64, torch.device("cpu"))
    assert type(made) is Empty
    assert (made.shape, made.dtype, made.device.type) == ((2, 3), torch.float64, "cpu")
    with pytest.raises(ValueError, match="aten"):
        made + 1
    assert made.data_ptr() == 0
    made.requires_grad_().register_hook(lambda _: None)  # it may be a leaf of a graph


def _doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_function_remembers_what_it_was_made_from() -> None:
    scripted = torch.jit.script(_doubled)
    assert isinstance(scripted, torch.jit.ScriptFunction)
    assert private.source_of_scripted(scripted) is _doubled
    assert private.source_of_scripted(_doubled) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_matrices_are_multiplied_with_their_factors(dtype: torch.dtype) -> None:
    left, right = torch.randn(16, 32).to(dtype), torch.randn(48, 32).to(torch.float8_e4m3fn)
    factors = torch.tensor(0.5), torch.tensor(8.0)
    found = private.scaled_product(left, right, factors, torch.float32, fast=False)
    torch.testing.assert_close(found, 4 * left.float() @ right.float().t())
    by_rows = private.scaled_product(left, right.t().contiguous().t(), factors, torch.float32, fast=True)
    torch.testing.assert_close(by_rows, found)


def test_functions_of_tensors_have_the_names_of_operations() -> None:
    """What `__torch_function__` is called for, before torch 2.13 in place of `__torch_dispatch__`."""

    class Seen(torch.Tensor):
        names: ClassVar[list[str | None]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.names.append(functions_of_torch.name_of_function(func))
            return private.plain_functions(func, types, args, kwargs or {})

    x = torch.ones(2).as_subclass(Seen)
    _ = x.detach(), x.data, x * 2, 1 - x, torch.zeros_like(x), torch._foreach_norm([x]), x.sum(), x.shape
    assert Seen.names == ["detach", "detach", "mul", "__rsub__", "zeros_like", "_foreach_norm", "sum", None]
    elementwise = [name for name in Seen.names if name is not None and functions_of_torch.names_elementwise(name)]
    assert elementwise == ["detach", "detach", "mul", "__rsub__", "zeros_like"]


def _dispatches() -> bool:
    seen: list[Any] = []

    class Seen(DTensor):
        __torch_function__ = private.plain_functions  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            seen.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    held = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0]), [Replicate()], run_check=False)
    private.distributed_like(torch.ones(2), held, Seen).detach()
    return bool(seen)


def test_whether_subclasses_of_distributed_tensors_dispatch_is_known(ranks: RankPool) -> None:
    assert ranks.run(1, _dispatches) == [private.DISPATCHES_SUBCLASSES]


def test_flops_of_queries_that_share_keys() -> None:
    query, key = torch.ones(1, 4, 8, 16), torch.ones(1, 2, 8, 16)
    with private.FlopCounter() as counter, torch.no_grad():
        functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert counter.total == 2 * (2 * 4 * 8 * 8 * 16)
