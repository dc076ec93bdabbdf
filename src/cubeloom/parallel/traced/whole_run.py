"""The run of a traced model with whole sizes, which records every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.operations import Operation, needs_values
from cubeloom.parallel.check.record import Record
from cubeloom.parallel.check.run import META, leaves
from cubeloom.parallel.traced.choices import Sliced
from cubeloom.parallel.traced.constants import RunWithConstants
from cubeloom.parallel.traced.known import Known

_ENDS = {"detach", "data"}


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class WholeRun(RunWithConstants, Record):
    """`between`: parameters used outside of layers. `live`: calls of layers that the loss depends on, by position."""

    between: set[str]
    live: set[int]
    live_parameters: set[str]
    forwards: Counter[str]  # of modules with their own parameters
    reads: Counter[str]  # of parameters, outside of their modules' forwards

    def _refuse(self, operation: Operation, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        used = {name for tensor in tensors if (name := self.name_of(tensor)) is not None}
        self.between |= used
        running = {name for name, *_ in self.running}
        # A parameter of a module that is left whole is gathered at each use outside of its module's forward.
        self.reads.update(name for name in used if name.rpartition(".")[0] not in running)
        if needs_values(operation, tensors):
            self.refuse(f"{operation.name.strip('_')} asks for values of a tensor, which the model is traced without")

    def sliced(self, name: str, each: Sliced, whole: Tensor) -> Tensor:
        with self.paused():
            empty = torch.empty(whole.shape, dtype=whole.dtype, device=META)
        self.kept[id(empty)] = ("argument", name, each.argument), empty
        return empty

    def _note(self, name: str, tensors: list[Tensor], numbers: list[Any], results: list[Tensor], **more: Any) -> None:
        # Not by `requires_grad`: what an autograd function computes inside has none.
        given = any(each.requires_grad or self.known(each) in self._flows for each in tensors)
        if (given or more) and name not in _ENDS:
            self._flows.update(
                (len(self.entries), number) for number, each in enumerate(results) if _has_gradients(each)
            )
        super()._note(name, tensors, numbers, results, **more)

    @cached_property
    def _flows(self) -> set[Any]:
        """Results that may have a gradient. A tensor that is changed in place has several positions."""
        return set()

    def look_back(self, result: Any) -> None:
        """Find the layers and parameters that the loss depends on, or all results if there is no loss."""
        loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        roots = list[Tensor]()
        leaves(result if loss is None else loss, roots, [])
        flows = self._flows | {known for known, tensor in self.kept.values() if tensor.requires_grad}
        found, waiting = set[Any](), [self.known(root) for root in roots]
        while waiting:
            key = waiting.pop()
            if key in flows and key not in found:
                found.add(key)
                if isinstance(key[0], int):
                    waiting += self.entries[key[0]].inputs
        self.live = {key[0] for key in found if isinstance(key[0], int)}
        names = {id(each): name for name, each in self.model.named_parameters()}
        names |= {id(twin): names[key] for key, (_, twin) in self.outside.items() if key in names}
        self.live_parameters = {names[key[1]] for key in found if key[0] == "outside" and key[1] in names}

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
    """The whole run. A layer whose parameters are used outside of it is not treated as a layer."""
    owners: dict[int, set[str]] = {}  # of each parameter: tied layers share one
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    while True:
        record = WholeRun(model, list(known), {name: each for name, each in inputs.items() if _is_empty(each)})
        record.between, record.slices, record.reads = set(), slices, Counter()
        with _counting(model) as record.forwards:
            record.look_back(run_with(record, inputs))
        used = {owner for name in record.between for owner in owners[id(model.get_parameter(name))]}
        if not used & set(known):
            return record, dict(known)
        known = {name: each for name, each in known.items() if name not in used}


@contextmanager
def _counting(model: nn.Module) -> Iterator[Counter[str]]:
    """Count how often each module with its own parameters runs."""
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
    """Random numbers are the same in each run."""
    for value in inputs.values():
        if isinstance(value, Tensor) and not value.is_meta:
            run.constant(value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run.run(inputs)
