"""The run of a traced model as it is, of which each operation is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.parallel.check.operations import Operation, needs_values
from cubeloom.parallel.check.record import Record
from cubeloom.parallel.check.run import META
from cubeloom.parallel.traced.choices import Sliced
from cubeloom.parallel.traced.constants import RunWithConstants
from cubeloom.parallel.traced.known import Known


class WholeRun(RunWithConstants, Record):
    """`between`: parameters that are used outside of the layers."""

    between: set[str]
    forwards: Counter[str]  # of modules with parameters of their own

    def _refuse(self, operation: Operation, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        self.between |= {name for tensor in tensors if (name := self.name_of(tensor)) is not None}
        if needs_values(operation, tensors):
            self.refuse(f"{operation.name.strip('_')} asks for values of a tensor, which the model is traced without")

    def sliced(self, name: str, each: Sliced, whole: Tensor) -> Tensor:
        with self.paused():
            empty = torch.empty(whole.shape, dtype=whole.dtype, device=META)
        self.kept[id(empty)] = ("argument", name, each.argument), empty
        return empty

    def known(self, tensor: Tensor) -> Any:
        return self.known_constant(tensor) or super().known(tensor)

    def layer(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        with self.paused():
            args, kwargs = torch_private.tree_map(self._on_meta, (args, kwargs))
        return super().layer(name, plain, args, kwargs)


def recorded(
    model: nn.Module,
    known: Mapping[str, Known],
    inputs: Mapping[str, Any],
    slices: Mapping[str, Sequence[Sliced]],
) -> tuple[WholeRun, dict[str, Known]]:
    """The whole run; a layer whose parameters are used outside of it is none."""
    while True:
        record = WholeRun(model, list(known), {name: each for name, each in inputs.items() if _is_empty(each)})
        record.between, record.slices = set(), slices
        with _counting(model) as record.forwards:
            run_with(record, inputs)
        used = {name.rpartition(".")[0] for name in record.between}
        if not used & set(known):
            return record, dict(known)
        known = {name: each for name, each in known.items() if name not in used}


@contextmanager
def _counting(model: nn.Module) -> Iterator[Counter[str]]:
    """How often each module that has parameters of its own runs."""
    counts: Counter[str] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def run_with(run: RunWithConstants, inputs: Mapping[str, Any]) -> Any:
    """What is drawn at random is the same in each run."""
    for value in inputs.values():
        if isinstance(value, Tensor) and not value.is_meta:
            run.constant(value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run.run(inputs)
