"""Modules that are left whole: plain modules that read distributed parameters as plain tensors.

An attribute `weight` of such a module is a property of a class made for it. Whoever reads it, inside or outside of the
module's forward or in a recomputation, gets the rank's tensor inside autograd; `parameters()` and `state_dict()` have the
distributed one under its own name.
"""

from __future__ import annotations

from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.parallel.state import CubeState


def read_locally(module: nn.Module, names: list[str], state: CubeState) -> None:
    """From now on these parameters of the module, which are distributed, are read as plain tensors."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: _local(name, state) for name in names})


def held_elsewhere(module: nn.Module) -> str | None:
    """An attribute that holds parameters where they could not be replaced, as torch's recurrent layers have."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_modules"):
            continue
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(each, nn.Parameter) for each in inner):
            return name
    return None


def _local(name: str, state: CubeState) -> property:
    def read(module: nn.Module) -> Tensor:
        parameter = torch_private.parameters_of(module)[name]
        assert parameter is not None
        return state.local(parameter)

    return property(read)
