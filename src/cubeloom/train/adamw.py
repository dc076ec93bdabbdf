"""AdamW with moments in bfloat16 that are rounded stochastically, so that small updates are not lost.

The second moment of a parameter changes by a twentieth or a thousandth of the difference to the squared gradient. Rounded
to the nearest of bfloat16's 8 bits, such a change is nearly always lost. Rounded up or down at random, with the
probability that makes the mean right, it is not.

The random bits depend on the parameter's name, the element's index in the whole tensor and the number of the update. A
run therefore rounds alike on every grid, with sharded state, and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cubeloom.base import counter, torch_private
from cubeloom.parallel.arranged import Lie
from cubeloom.parallel.parameter import local_of
from cubeloom.train.adamw_update import Hyper, Place, update

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names


class AdamW(torch.optim.Optimizer):
    """Computes as torch's fused AdamW, in at least float32, and writes the moments in bfloat16.

    Weights of bfloat16 are rounded stochastically as well. State and checkpoints have torch's names, so that each
    resumes from the other's. Like torch's fused optimizers it takes `grad_scale`, which gradients are divided by, and
    `found_inf`, which forbids the update if it is 1; both are decided on the device.
    """

    moments = torch.bfloat16

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        )
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._places: dict[nn.Parameter, Place] = {}

    def locate(self, parameter: nn.Parameter, name: str, lie: Lie) -> None:
        """Where the elements of this parameter lie in the whole tensor of this name. Needed before the first step."""
        local = _local(parameter)
        self._places[parameter] = Place(counter.key("adamw", name), *index_of(lie, local.shape, local.device))

    @property
    def indices(self) -> list[Tensor]:
        """The memory of all positions."""
        return [side for place in self._places.values() for side in (place.rows, place.columns)]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if parameters:
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self._state_of(each) for each in parameters]
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        torch_private.add_to_each(steps, 1.0 if self.found_inf is None else 1.0 - self.found_inf)
        update(
            [_local(each) for each in parameters],
            [_local(each.grad) for each in parameters if each.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [self._places[each] for each in parameters],
            torch.stack(steps),
            Hyper(group["lr"], beta1, beta2, group["eps"], group["weight_decay"]),
            self.grad_scale,
            self.found_inf,
        )

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            local = _local(parameter)
            state["step"] = torch.zeros((), device=local.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(local, dtype=self.moments)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also that of torch's AdamW, whose moments are rounded to the nearest."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in MOMENTS:
                # torch casts state to the dtype of the parameter. Back to bfloat16 that is exact.
                state[name] = state[name].to(self.moments)
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=_local(parameter).device)


def _local(tensor: Tensor) -> Tensor:
    """This rank's block, if the tensor is distributed."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def index_of(lie: Lie, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two vectors whose outer sum is the index of each element in the flattened whole tensor, [rows, other dims]."""
    sides = []
    for dim, size in enumerate(shape):
        at = torch.arange(size) + lie.offset[dim]
        if dim == lie.dim and lie.runs:
            at = torch.cat([torch.arange(run.length) + (run.first or 0) for run in lie.runs])
        sides.append(at * prod(lie.whole[dim + 1 :]))
    rows, columns = sides[0] if sides else torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for side in sides[1:]:
        columns = (columns[:, None] + side).flatten()
    return rows.to(device), columns.to(device)
