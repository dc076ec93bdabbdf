"""What torch keeps for a thread and a strand may change: each strand must find its own when its turn comes.

Without this, one strand's autocast would leak into another, and one strand's tensors would go through the hooks of
another's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from cubeloom.comm import devices

_DEVICES = tuple(devices.BACKENDS)
_hooks = torch._C._autograd
Hooks = tuple[Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class ThreadState:
    gradients: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]  # on each device
    autocast_cache: bool
    hooks: tuple[Hooks, ...]  # of saved tensors, innermost first
    modes: tuple[TorchDispatchMode, ...]  # innermost first

    @classmethod
    def take(cls) -> ThreadState:
        """The state of now. Hooks and modes are taken off the thread, to be put back by `put`."""
        hooks = []
        while (top := _hooks._top_saved_tensors_default_hooks(True)) is not None:
            hooks.append(top)
            _hooks._pop_saved_tensors_default_hooks()
        modes = tuple(_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack()))
        return cls(
            torch.is_grad_enabled(),
            tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES),
            torch.is_autocast_cache_enabled(),
            tuple(hooks),
            modes,
        )

    def put(self) -> None:
        """Make it the thread's, on which no hooks and modes are."""
        torch.set_grad_enabled(self.gradients)
        for kind, (on, dtype) in zip(_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for pack, unpack in reversed(self.hooks):
            _hooks._push_saved_tensors_default_hooks(pack, unpack)
        for mode in reversed(self.modes):
            _push_mode(mode)
