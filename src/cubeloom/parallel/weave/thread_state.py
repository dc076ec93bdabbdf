"""The state that torch keeps per thread and that a strand may change: it is saved and restored when strands switch.

Without this, one strand's autocast would affect another, and one strand's tensors would pass through the hooks of
another's checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from cubeloom.base import torch_private
from cubeloom.comm import devices

_DEVICES = tuple(devices.BACKENDS)


@dataclass(frozen=True)
class ThreadState:
    gradients: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]  # per device
    autocast_cache: bool
    hooks: tuple[torch_private.SavedTensorHooks, ...]  # for saved tensors, innermost first
    modes: tuple[torch_private.TorchDispatchMode, ...]  # innermost first
    function_modes: tuple[TorchFunctionMode, ...]  # innermost first
    dtype: torch.dtype  # by default

    @classmethod
    def take(cls) -> ThreadState:
        """The current state. Hooks and modes are removed from the thread; `put` restores them."""
        return cls(
            torch.is_grad_enabled(),
            tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES),
            torch.is_autocast_cache_enabled(),
            torch_private.take_off_saved_tensor_hooks(),
            torch_private.take_off_dispatch_modes(),
            torch_private.take_off_function_modes(),
            torch.get_default_dtype(),
        )

    def put(self) -> None:
        """Restore the state on a thread without hooks and modes."""
        torch.set_grad_enabled(self.gradients)
        for kind, (on, dtype) in zip(_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch_private.put_on_saved_tensor_hooks(self.hooks)
        torch_private.put_on_dispatch_modes(self.modes)
        torch.set_default_dtype(self.dtype)
        torch_private.put_on_function_modes(self.function_modes)
