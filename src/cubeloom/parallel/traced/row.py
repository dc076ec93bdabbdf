"""A model's row of blocks, at which a pipeline can cut it: the modules that its forward calls, and the tensors between
them.

A stage runs the model's own forward. Modules with parameters of an earlier stage return what they returned there; the
first module of a later stage ends the forward. Stages therefore send outputs of modules that something later depends
on. What the forward computes from its inputs alone, such as masks and positions, each stage computes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.base.operations import operation_of
from cubeloom.parallel.check.tracked import Tracked
from cubeloom.parallel.traced.units import Units, units_of

Source = tuple[int, int]
"""An output tensor of a module: the call, and the leaf of its output."""
_OF_LAYER = "weight"  # stands for all parameters of a layer
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
# The results of these have the shape, dtype or device of a tensor, and none of its values.
_OF_ITS_LOOKS = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
_NEW = "new_"
_LOOKS_OF_OTHERS = {"type_as", "to", "expand_as", "view_as", "reshape_as"}


@dataclass(frozen=True)
class BlockOutput:
    """A tensor on one rank: elements per sample, or for any number of samples if it is the same for all."""

    numbers: int
    of_samples: bool
    changed: bool = False  # in place, by code after the module that returned it


@dataclass(frozen=True)
class Same:
    """In an output: the same object that the module was given, as this leaf of its arguments."""

    leaf: int


@dataclass(frozen=True)
class Made:
    """In an output: a tensor that the module created."""

    leaf: int


@dataclass
class Call:
    """One call of a unit. `takes`: for each tensor argument, by leaf, the outputs and parameters that it depends on."""

    unit: str
    takes: dict[int, frozenset[Source | str]]
    shapes: dict[int, BlockOutput]  # of the tensors that it created
    gives: Any = None  # its output, with `Same` and `Made` in place of tensors
    made: dict[int, BlockOutput] = field(default_factory=dict)
    floats: frozenset[int] = frozenset()  # those of the created tensors that have gradients
    opaque: str | None = None  # the type of an object in its output that cannot be rebuilt


@dataclass(frozen=True)
class Row:
    """The calls of a forward, in order, and the pieces that they form: a piece cannot be cut."""

    units: tuple[str, ...]
    calls: tuple[Call, ...]
    result: frozenset[Source | str]  # what the model's result depends on
    pieces: tuple[range, ...]  # of calls
    modules: tuple[tuple[str, ...], ...]  # of each piece; `name.` stands for this module's own parameters
    first: int  # the call of the first block
    why: str  # why there are not more pieces

    def used_after(self, piece: int) -> list[Source]:
        """Outputs up to this piece that a later piece depends on, except those in `enters`."""
        stop = self.pieces[piece].stop
        entered = stop == self.first
        uses = [call.takes.values() for call in self.calls[stop + entered :]]
        found = {source for takes in uses for one in takes for source in one} | self.result
        return sorted(source for source in found if not isinstance(source, str) and source[0] < stop)

    def enters(self, piece: int) -> list[int]:
        """If the next piece starts with the first block: the leaves of its arguments that are sent to it as they are."""
        if self.pieces[piece].stop != self.first:
            return []
        return sorted(leaf for leaf, sources in self.calls[self.first].takes.items() if sources)

    def block_outputs(self, piece: int) -> dict[str, BlockOutput]:
        """Everything that this piece sends to the next, by name."""
        first = self.calls[self.first]
        entering = {entry_name(leaf): first.shapes[leaf] for leaf in self.enters(piece)}
        return entering | {
            self.name_of(source): self.calls[source[0]].made[source[1]] for source in self.used_after(piece)
        }

    def name_of(self, source: Source) -> str:
        call, leaf = source
        return f"{self.calls[call].unit}@{call}.{leaf}"


def entry_name(leaf: int) -> str:
    return f"@{leaf}"


class Watching(TorchFunctionMode):
    """Records which modules a run calls, and what their arguments depend on."""

    def __init__(
        self, model: nn.Module, units: Units, layers: Iterable[str], output_of: Callable[[Tensor], BlockOutput]
    ) -> None:
        super().__init__()
        inner = {name for name in layers if any(name.startswith(f"{unit}.") for unit in units.units)}
        self._layers = {id(each): name for name, each in model.named_modules() if name in inner}
        self._names = {id(model.get_submodule(name)): name for name in units.units}
        self._owners = {id(each): name for name, each in model.named_parameters()}
        self._output_of = output_of
        self._sources: dict[int, frozenset[Source | str]] = {}
        self._alive: list[Any] = []  # so that ids stay unique
        self._versions: list[tuple[Call, int, Tensor, int]] = []
        self._depth = 0
        self._given: list[tuple[Any, int]] = []  # arguments of the current call, and their version counters
        self.calls: list[Call] = []
        self.result: frozenset[Source | str] = frozenset()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(function)
        name, result = operation.name, function(*args, **kwargs)
        if operation.iterates:
            result = list(result)
        if name in _OF_ITS_LOOKS or name.startswith(_NEW):
            return result
        given = args[:1] if name in _LOOKS_OF_OTHERS else (args, kwargs)
        sources = self._union(torch_private.tree_leaves(given))
        if sources:
            for each in (*torch_private.tree_leaves(result), *(args[:1] if operation.in_place else ())):
                self._depends(each, sources)
        return iter(result) if operation.iterates else result

    def _union(self, values: Iterable[Any]) -> frozenset[Source | str]:
        found: frozenset[Source | str] = frozenset()
        for each in values:
            if isinstance(each, Tensor):
                found |= self.sources_of(each)
        return found

    def sources_of(self, tensor: Tensor) -> frozenset[Source | str]:
        if id(tensor) in self._owners and not self._depth:
            return frozenset({self._owners[id(tensor)]})
        return self._sources.get(id(tensor), frozenset())

    def _depends(self, value: Any, sources: frozenset[Source | str]) -> None:
        if isinstance(value, Tensor):
            self._alive.append(value)
            self._sources[id(value)] = sources

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Within this context a forward of the model is recorded."""
        hooks = []
        for name in self._names.values():
            module = model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._after, with_kwargs=True))
        for name in self._layers.values():
            hooks.append(model.get_submodule(name).register_forward_hook(self._after_layer, with_kwargs=True))
        plain, own = model.forward, "forward" in vars(model)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self:
                result = plain(*args, **kwargs)
            self.result = self._union(torch_private.tree_leaves(result))
            return result

        model.forward = forward
        try:
            yield
        finally:
            if own:
                model.forward = plain
            else:
                del model.forward
            for hook in hooks:
                hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        given = torch_private.tree_leaves((args, kwargs))
        tensors = {leaf: each for leaf, each in enumerate(given) if isinstance(each, Tensor)}
        takes = {leaf: self.sources_of(each) for leaf, each in tensors.items()}
        shapes = {leaf: self._output_of(each) for leaf, each in tensors.items() if takes[leaf]}
        self._given = [(each, torch_private.version(each) if isinstance(each, Tensor) else 0) for each in given]
        self.calls.append(Call(self._names[id(module)], takes, shapes))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        call, number = self.calls[-1], len(self.calls) - 1
        same = {
            id(each): leaf
            for leaf, (each, version) in enumerate(self._given)
            if not isinstance(each, Tensor) or torch_private.version(each) == version
        }
        place = iter(range(len(torch_private.tree_leaves(output))))
        floats = set()

        def marked(value: Any) -> Any:
            leaf = next(place)
            if isinstance(value, Tensor):
                if id(value) in same:
                    return Same(same[id(value)])
                call.made[leaf] = self._output_of(value)
                self._depends(value, frozenset({(number, leaf)}))
                self._versions.append((call, leaf, value, torch_private.version(value)))
                if value.is_floating_point():
                    floats.add(leaf)
                return Made(leaf)
            if isinstance(value, _PLAIN):
                return value
            if id(value) in same:
                return Same(same[id(value)])
            call.opaque = type(value).__name__
            return None

        call.gives = torch_private.tree_map(marked, output)
        call.floats = frozenset(floats)

    def _after_layer(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Called outside of its unit, it makes use of the unit's parameters there."""
        if not self._depth:
            used = frozenset({f"{self._layers[id(layer)]}.{_OF_LAYER}"})
            for each in torch_private.tree_leaves(output):
                self._depends(each, self._union(torch_private.tree_leaves((args, kwargs))) | used)

    def row(self, units: Units) -> Row:
        for call, leaf, tensor, version in self._versions:
            if torch_private.version(tensor) != version:
                made = call.made[leaf]
                call.made[leaf] = BlockOutput(made.numbers, made.of_samples, changed=True)
        return made_row(units, tuple(self.calls), self.result)


def watched_row(model: nn.Module, layers: Iterable[str], again: Callable[[nn.Module, Any], object]) -> Row:
    """`again` runs the model as a rank with some of its samples. `layers` are those that are replaced."""
    units = units_of(model, layers)
    watching: list[Watching] = []

    @contextmanager
    def watch(of: Callable[[Tensor], Tracked], samples: int) -> Iterator[None]:
        def output_of(tensor: Tensor) -> BlockOutput:
            of_samples = of(tensor).of_samples
            return BlockOutput(tensor.numel() // samples if of_samples else tensor.numel(), of_samples)

        watching.append(Watching(model, units, layers, output_of))
        with watching[-1].on(model):
            yield

    again(model, watch)
    return watching[-1].row(units)


def made_row(units: Units, calls: tuple[Call, ...], result: frozenset[Source | str]) -> Row:
    """Cut before each block and after the last one, except where calls belong together."""
    blocks = [number for number, call in enumerate(calls) if call.unit in units.blocks]
    if not blocks:
        raise UserError(f"the model's forward calls none of its blocks ({', '.join(sorted(units.blocks)[:3])}, ...)")
    first = blocks[0]
    starts = {0, *blocks, *([blocks[-1] + 1] if blocks[-1] + 1 < len(calls) else [])}
    why = ""
    for begin, end, reason in _together(units, calls, result, first):
        lost = {start for start in starts if begin < start <= end}
        if lost:
            starts -= lost
            why = why or reason
    if len(blocks) > 1 and not starts & set(blocks[1:]):
        raise UserError(f"the model's row of blocks cannot be cut: {why}")
    ends = sorted(starts)
    pieces = [range(start, stop) for start, stop in zip(ends, [*ends[1:], len(calls)], strict=True)]
    modules = [list(dict.fromkeys(calls[number].unit for number in piece)) for piece in pieces]
    called = {call.unit for call in calls}
    modules[-1] += [unit for unit in units.units if unit not in called]
    for owner in units.owners:
        used = _uses(owner, units, calls, result, first)
        place = used[0] if used else len(calls) - 1
        modules[next(number for number, piece in enumerate(pieces) if place in piece)].append(f"{owner}.")
    return Row(units.units, calls, result, tuple(pieces), tuple(map(tuple, modules)), first, why)


def _together(
    units: Units, calls: tuple[Call, ...], result: frozenset[Source | str], first: int
) -> Iterator[tuple[int, int, str]]:
    """Ranges of calls that must be in one stage, and why."""
    last = len(calls) - 1
    at: dict[str, list[int]] = {}
    for number, call in enumerate(calls):
        at.setdefault(call.unit, []).append(number)
        if call.opaque is not None:
            yield number, last, f"{call.unit} gives a {call.opaque}, which cannot travel"
    for unit, places in at.items():
        if len(places) > 1:
            yield places[0], places[-1], f"{unit} is called {len(places)} times in a forward"
    for owner in (*units.units, *units.owners):
        used = _uses(owner, units, calls, result, first)
        if used:
            every = [*used, *at.get(owner, [])]
            yield min(every), max(every), f"parameters of {owner or 'the model itself'} are used in several places"
    for number, takes in [*((number, call.takes) for number, call in enumerate(calls)), (last, {0: result})]:
        for source in (source for sources in takes.values() for source in sources):
            if not isinstance(source, str) and source[1] not in calls[source[0]].floats:
                yield source[0], number, f"{calls[source[0]].unit} gives whole numbers, which have no gradients"


def _uses(owner: str, units: Units, calls: tuple[Call, ...], result: frozenset[Source | str], first: int) -> list[int]:
    """The calls that depend on a parameter of this module that the forward itself uses."""

    def has(sources: frozenset[Source | str]) -> bool:
        return any(isinstance(source, str) and units.owner_of(source) == owner for source in sources)

    found = [number for number, call in enumerate(calls) if any(map(has, call.takes.values()))]
    # The arguments of the first block are computed by the calls before it.
    found = [number - (number == first and first > 0) for number in found]
    return found + ([len(calls) - 1] if has(result) else [])
