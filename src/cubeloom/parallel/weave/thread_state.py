"""What torch keeps for a thread and a strand may change: each strand must find its own when its turn comes.

Without this, one strand's autocast would leak into another, and one strand's tensors would go through the hooks of
another's checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cubeloom.base import torch_private
from cubeloom.comm import devices

_DEVICES = tuple(devices.BACKENDS)


@dataclass(frozen=True)
class ThreadState:
    gradients: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]  # on each device
    autocast_cache: bool
    hooks: tuple[torch_private.SavedTensorHooks, ...]  # of saved tensors, innermost first
    modes: tuple[torch_private.TorchDispatchMode, ...]  # innermost first

    @classmethod
    def take(cls) -> ThreadState:
        """The state of now. Hooks and modes are taken off the thread, to be put back by `put`."""
        return cls(
            torch.is_grad_enabled(),
            tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES),
            torch.is_autocast_cache_enabled(),
            torch_private.take_off_saved_tensor_hooks(),
            torch_private.take_off_dispatch_modes(),
        )

    def put(self) -> None:
        """Make it the thread's, on which no hooks and modes are."""
        torch.set_grad_enabled(self.gradients)
        for kind, (on, dtype) in zip(_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch_private.put_on_saved_tensor_hooks(self.hooks)
        torch_private.put_on_dispatch_modes(self.modes)
