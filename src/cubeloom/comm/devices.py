"""The device that a rank computes on and the backend between such devices. No other module names either."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from cubeloom.base import torch_private
from cubeloom.comm.kinds import BACKENDS as BACKENDS
from cubeloom.comm.kinds import CPU as CPU
from cubeloom.comm.kinds import Kind as Kind


def available(kind: Kind) -> bool:
    return kind == "cpu" or torch.cuda.is_available()


def count(kind: Kind) -> int:
    """The number of these devices on this machine."""
    return torch.cuda.device_count() if kind == "cuda" else 1


def use(kind: Kind, local_rank: int) -> torch.device:
    """The device of this rank, made current. If there are more ranks than GPUs, they share them round-robin."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def current(kind: Kind) -> torch.device:
    """The device that `use` made current."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has matmuls of FP8 operands: NVIDIA's from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def compute_in_full() -> None:
    """Turn off TF32, which torch allows for convolutions on a GPU: its errors are a thousand times larger and depend on
    the shapes of blocks. Also make repeated computations deterministic, so that ranks that compute the same get the
    same bits.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def assert_all(true: torch.Tensor, message: str) -> bool:
    """Whether all of these are true. On a GPU the host does not wait: the device asserts it and stops if it is false."""
    if true.is_cuda:
        torch_private.assert_async(true.all(), message)
        return True
    return bool(true.all().item())


class Instant:
    """A moment in a device's work: on a GPU, when its stream reaches it. Read it after `settle`."""

    def __init__(self, device: torch.device) -> None:
        self._moment: float | torch.cuda.Event
        if device.type == "cpu":
            self._moment = time.perf_counter()
        else:
            self._moment = torch.cuda.Event(enable_timing=True)
            self._moment.record()

    def since(self, earlier: Instant) -> float:
        """Seconds since an earlier moment."""
        if isinstance(self._moment, float) and isinstance(earlier._moment, float):
            return self._moment - earlier._moment
        assert not isinstance(self._moment, float) and not isinstance(earlier._moment, float)
        return float(earlier._moment.elapsed_time(self._moment)) / 1e3


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has allocated: tensors on a GPU, all memory on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated(device)


def name(device: torch.device) -> str:
    """The maker's name of the device."""
    return device.type if device.type == "cpu" else torch.cuda.get_device_name(device)


def repeat_exactly() -> None:
    """Make operations fail that could give different bits the next time."""
    torch.use_deterministic_algorithms(True)


def recording(device: torch.device) -> bool:
    """Whether the device's work is being recorded (as a CUDA graph) and not run."""
    return device.type != "cpu" and torch.cuda.is_current_stream_capturing()


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for its earlier work, which a copy from pageable memory would do."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Copies:
    """Copies between the host's memory and a device, beside the device's other work: on a GPU in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
        """Copies on the device, and the moment from which on they may be used: see `wait`."""
        with self._beside():
            found = {name: each.to(self._device, non_blocking=True, copy=True) for name, each in tensors.items()}
            return found, None if self._stream is None else self._stream.record_event()

    def wait(self, moment: torch.cuda.Event | None) -> None:
        """The device's work that is launched from here on begins after this moment. The host does not wait."""
        if moment is not None:
            torch.cuda.current_stream(self._device).wait_event(moment)

    def store(self, tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
        """Copy to memory of `host_memory`, after all work launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._beside():
            for name, each in tensors.items():
                into[name].copy_(each, non_blocking=True)
                if self._stream is not None:
                    each.record_stream(self._stream)  # its memory is reused only after it was copied

    def join(self) -> None:
        """The device's work that is launched from here on begins after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def host_memory(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Uninitialised memory of the host for a tensor of a device; pinned, so that copies need not wait for each other."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.device.type != "cpu")


def settle(device: torch.device) -> None:
    """Wait until the device has finished all its work, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sockets_on(interface: str) -> dict[str, str]:
    """Environment variables that keep the sockets of both backends on this network interface."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def wiring(kind: Kind, local_rank: int, shared: bool) -> dict[str, str]:
    """Environment variables for the backends of a rank whose peers are all on this machine: sockets listen on the
    loopback, which no other machine reaches. `shared`: several ranks on one GPU.
    """
    # Ranks with GPUs also have gloo groups, for communication beside training.
    found = sockets_on("lo")
    if kind != "cpu" and shared:
        # NCCL refuses two ranks of one host on one GPU, but treats another host id as another host.
        found["NCCL_HOSTID"] = f"cubeloom-{local_rank}"
        # Two channels, each with its own connection, are slower for a message there than one: 8 MiB were passed on
        # three times in 11.1 ms over one, in 16.7 ms over two (H200, NCCL 2.28, 2026-11-16).
        found["NCCL_MAX_P2P_NCHANNELS"] = "1"
    return found


def num_comm_channels(kind: Kind, ranks: int) -> int:
    """The best number of communicators over which to split large collectives of these ranks of one machine.

    Ranks that share a GPU communicate through sockets, which one communicator does not saturate: an all-reduce of 16
    MiB took 7.9 ms over one and 5.9 ms over two (four ranks on an H200, 2026-11-15).
    """
    return 2 if kind == "cuda" and ranks > count(kind) else 1
