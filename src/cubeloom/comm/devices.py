"""Which device a rank computes on and which backend joins such devices; no other module names either."""

from __future__ import annotations

import resource
import time

import torch

from cubeloom.base import torch_private
from cubeloom.comm.kinds import BACKENDS as BACKENDS
from cubeloom.comm.kinds import CPU as CPU
from cubeloom.comm.kinds import Kind as Kind


def available(kind: Kind) -> bool:
    return kind == "cpu" or torch.cuda.is_available()


def count(kind: Kind) -> int:
    """How many of them this machine has."""
    return torch.cuda.device_count() if kind == "cuda" else 1


def use(kind: Kind, local_rank: int) -> torch.device:
    """The device of this rank, made current. Ranks beyond the number of GPUs share them in turn."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def current(kind: Kind) -> torch.device:
    """The device that `use` made current."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def compute_in_full() -> None:
    """No float32 product may be computed in TF32, which torch allows convolutions on a GPU: its errors are a thousand times
    larger, and differ with the shapes of blocks. And none may come out differently when it is computed twice, so that ranks
    that compute the same have the same bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def assert_all(true: torch.Tensor, message: str) -> bool:
    """Whether all of these are true. A GPU is not waited for: it asserts that they are, and stops if not."""
    if true.is_cuda:
        torch_private.assert_async(true.all(), message)
        return True
    return bool(true.all().item())


class Instant:
    """A moment of a device's work: on a GPU, when its stream comes to it. Read once the device has settled."""

    def __init__(self, device: torch.device) -> None:
        self._moment: float | torch.cuda.Event
        if device.type == "cpu":
            self._moment = time.perf_counter()
        else:
            self._moment = torch.cuda.Event(enable_timing=True)
            self._moment.record()

    def since(self, earlier: Instant) -> float:
        """Seconds."""
        if isinstance(self._moment, float) and isinstance(earlier._moment, float):
            return self._moment - earlier._moment
        assert not isinstance(self._moment, float) and not isinstance(earlier._moment, float)
        return float(earlier._moment.elapsed_time(self._moment)) / 1e3


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of tensors on a GPU, of everything on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated(device)


def name(device: torch.device) -> str:
    """What its maker calls it."""
    return device.type if device.type == "cpu" else torch.cuda.get_device_name(device)


def repeat_exactly() -> None:
    """Let operations that could give other bits the next time fail instead."""
    torch.use_deterministic_algorithms(True)


def recording(device: torch.device) -> bool:
    """Whether what the device is given is recorded (a CUDA graph) and not carried out."""
    return device.type != "cpu" and torch.cuda.is_current_stream_capturing()


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for what it has to do before: a copy from memory that may be paged would."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wiring(kind: Kind, local_rank: int, shared: bool) -> dict[str, str]:
    """Environment that the backends want of a rank whose others are all on this machine: they listen on the loopback, which
    nobody else reaches; `shared`: several on one GPU."""
    # Ranks with GPUs have groups of gloo, too, for what goes on beside training.
    found = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if kind != "cpu" and shared:
        # NCCL refuses two ranks of one host on one GPU, and takes each other id for another host.
        found["NCCL_HOSTID"] = f"cubeloom-{local_rank}"
        # Two channels, each with a connection of its own, are slower there for a message than one: 8 MiB were handed on three
        # times in 11.1 ms over one, in 16.7 ms over two (H200, NCCL 2.28, 2026-11-16).
        found["NCCL_MAX_P2P_NCHANNELS"] = "1"
    return found


def lanes(kind: Kind, ranks: int) -> int:
    """Over how many communicators large collectives of so many ranks of one machine are best cut.

    Ranks that share a GPU talk through sockets, which one communicator does not fill: 16 MiB were summed in 7.9 ms over one
    and in 5.9 ms over two (four ranks on an H200, 2026-11-15).
    """
    return 2 if kind == "cuda" and ranks > count(kind) else 1
