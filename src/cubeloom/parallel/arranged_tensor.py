"""Parameters and gradients whose rows are in another order than in the serial model: users still read the serial
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from cubeloom.base import functions_of_torch, torch_private
from cubeloom.base.errors import UserError
from cubeloom.parallel.arrangement import Arrangement


class ArrangedTensor(DTensor):
    """A DTensor of the arranged rows. `full_tensor()` returns the serial model's: its rows in order, each once, no
    padding.

    Copies of it and results of element-wise operations are of this class too. `shape` is that of the arranged tensor.
    """

    arrangement: Arrangement

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Before torch 2.13 operations are seen here only, and not in `__torch_dispatch__`."""
        found = torch_private.plain_functions(func, types, args, kwargs or {})
        name = functions_of_torch.name_of_function(func)
        if name is None:  # an attribute
            return found
        arranged = [each for each in torch_private.tree_leaves((args, kwargs)) if isinstance(each, ArrangedTensor)]
        elementwise = functions_of_torch.names_elementwise(name)
        if not elementwise and any(isinstance(each, Tensor) for each in torch_private.tree_leaves(found)):
            _check_copies(arranged, name)
        if elementwise and type(found) is DTensor and found.placements == arranged[0].placements:
            return _become_arranged(found, arranged[0].arrangement)
        return found

    def clone(self, **options: Any) -> ArrangedTensor:
        """For `deepcopy` before torch 2.13, inside of which `__torch_function__` is not called."""
        return _become_arranged(super().clone(**options), self.arrangement)

    @classmethod
    def of(cls, held: Tensor, arrangement: Arrangement) -> ArrangedTensor:
        made: ArrangedTensor = torch_private.distributed_like(torch_private.local_tensor(held), held, cls)
        made.arrangement = arrangement
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        arranged = [each for each in torch_private.tree_leaves((args, kwargs)) if isinstance(each, ArrangedTensor)]
        elementwise = functions_of_torch.is_elementwise(func)
        if not elementwise:
            _check_copies(arranged, func.overloadpacket.__name__)
        found = super().__torch_dispatch__(func, types, args, kwargs or {})
        if torch_private.changes_its_input(func):
            return args[0]
        if elementwise and isinstance(found, DTensor) and found.placements == arranged[0].placements:
            return ArrangedTensor.of(found, arranged[0].arrangement)
        return found

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        held = super().redistribute(device_mesh, placements, **options)
        if placements is None or not all(isinstance(each, Replicate) for each in placements):
            return held
        whole = held.to_local().index_select(self.arrangement.dim, self._places.to(held.device))
        return DTensor.from_local(whole, held.device_mesh, placements, run_check=False)

    @property
    def _places(self) -> Tensor:
        """For each row of the serial tensor, its index in the arranged one."""
        places = torch.empty(self.arrangement.whole, dtype=torch.long)
        for run in self.arrangement.segments:
            if run.first is not None and run.counts:
                places[run.first : run.first + run.length] = torch.arange(run.start, run.stop)
        return places

    def __create_write_items__(self, name: str, tensor: Any) -> NoReturn:
        raise UserError(
            f"torch.distributed.checkpoint would save {name} as this grid holds it, which no other grid could load; use "
            "cubeloom.save"
        )


if torch_private.DISPATCHES_SUBCLASSES:
    ArrangedTensor.__torch_function__ = torch_private.plain_functions  # type: ignore[assignment,method-assign]


def _become_arranged(found: Tensor, arrangement: Arrangement) -> ArrangedTensor:
    """The same tensor, in the same graph."""
    made: Any = found
    made.__class__, made.arrangement = ArrangedTensor, arrangement
    return made


def _check_copies(arranged: Sequence[ArrangedTensor], operation: str) -> None:
    if any(each.arrangement.copies > 1 for each in arranged):
        raise UserError(
            f"{operation} of a tensor of which several ranks have copies of the same rows would count them several times; "
            "use full_tensor(), or cubeloom.clip_grad_norm_ for norms of gradients"
        )
