"""Local computation compiled by torch: norms, activations, biases and residual sums in few kernels.

Where the cube is one device a block has no collectives: it is compiled as a whole, as the plain model has it. Elsewhere what
lies between collectives is: modules that the cut does not name, and the losses of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cubeloom.cube.forms import DropoutForm, Form, LinearForm, NormForm
from cubeloom.cube.gradients import Gradients
from cubeloom.cube.head import CubeHead
from cubeloom.cube.parameter import local_of
from cubeloom.cube.state import CubeState
from cubeloom.grid import Grid

BACKEND = "inductor"


def whole_blocks(model: nn.Module, forms: Sequence[Form], grid: Grid) -> dict[str, nn.Module]:
    """Plain copies, by name, of the blocks that can be compiled as a whole; taken before layers are replaced.

    Blocks are what lies in a list of modules, and a norm that lies in none. Every form in one must be the plain layer on a
    cube of one device.
    """
    if grid.x * grid.y * grid.z > 1:
        return {}
    by_name = {form.name: form for form in forms}
    found: dict[str, nn.Module] = {}
    for name, block in _blocks(model):
        names = (f"{name}.{inner}".rstrip(".") for inner, _ in block.named_modules())
        inside = [by_name[each] for each in names if each in by_name]
        if inside and all(_is_plain(form) for form in inside):
            found[name] = deepcopy(block)
    return found


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    within: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            within += (f"{name}.",)
            yield from ((f"{name}.{number}", block) for number, block in module.named_children())
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and not name.startswith(within):
            yield name, module


def _is_plain(form: Form) -> bool:
    if isinstance(form, LinearForm):
        return form.shares is None
    return isinstance(form, NormForm) or (isinstance(form, DropoutForm) and form.probability == 0)


def compile_local(model: nn.Module, plain: Mapping[str, nn.Module], state: CubeState) -> None:
    """Compile the blocks of which there is a plain copy, and what is local in the rest of a model that has been cut."""
    for name, block in plain.items():
        own = model.get_submodule(name)
        own.forward = _Block(block, dict(own.named_parameters()), state)
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{block}.") for block in plain):
            continue
        if isinstance(module, CubeHead):
            module.compile_local(BACKEND)
        elif _is_unnamed_leaf(module):
            module.forward = torch.compile(module.forward, backend=BACKEND)


def _is_unnamed_leaf(module: nn.Module) -> bool:
    """A layer that the cut left alone, but torch's own, which are one kernel as they are."""
    ours = type(module).__module__.startswith(("torch.nn", __name__.rpartition(".")[0]))
    return not ours and next(module.children(), None) is None and type(module).forward is not nn.Module.forward


class _Block:
    """Calls a plain block, compiled, with this rank's parameters in the place of its own."""

    def __init__(self, plain: nn.Module, parameters: Mapping[str, nn.Parameter], state: CubeState) -> None:
        self._plain = plain
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._state = state
        self._run = torch.compile(_call, backend=BACKEND)

    def __call__(self, *arguments: Any) -> Any:
        values = _Locals.apply(self._state.gradients, self._state.updates_under_way, *self._parameters)
        return self._run(self._plain, self._names, values, arguments)


def _call(plain: nn.Module, names: tuple[str, ...], values: tuple[Tensor, ...], arguments: tuple[Any, ...]) -> Any:
    return functional_call(plain, dict(zip(names, values, strict=True)), arguments)


class _Locals(torch.autograd.Function):
    """The local blocks of some parameters, inside autograd; in the backward all their gradients, at once."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, copied: bool, *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.parameters = gradients, parameters
        locals_ = tuple(local_of(parameter) for parameter in parameters)
        return tuple(each.clone() for each in locals_) if copied else locals_

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[None, ...]:
        for parameter, gradient in zip(ctx.parameters, found, strict=True):
            ctx.gradients.add(parameter, gradient.contiguous())
        return (None,) * (2 + len(found))
