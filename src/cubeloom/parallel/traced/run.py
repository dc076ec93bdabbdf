"""The two runs of a model that is traced: as the serial model, and as a rank, until no operation is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.parallel.check import pointwise, where
from cubeloom.parallel.check.gradient import summands
from cubeloom.parallel.check.operations import Operation, is_random, needs_values, operation_of
from cubeloom.parallel.check.record import Record
from cubeloom.parallel.check.replay import Replay
from cubeloom.parallel.check.run import META, Function, Run, leaves
from cubeloom.parallel.check.step import Refused, Step
from cubeloom.parallel.check.tracked import Dim, Dims, Factor, Tracked, common, local_shape, uncut
from cubeloom.parallel.cut import CutError, pattern_of
from cubeloom.parallel.traced.known import Known, Linear
from cubeloom.parallel.traced.patches import STAGES, patch_of, patched
from cubeloom.parallel.traced.placing import PLANE, Choices, Patched, Placed, Placing, Way

_MOST_TRIES = 200
_FEW = 4  # sections that a view takes the outputs of a layer apart into
_MOST_NUMBERS = 2**24  # of a tensor that is made for its values
_HOST = torch.device("cpu")
_MAKERS = {
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "tensor",
    "rand",
    "eye",
    "linspace",
    "scalar_tensor",
    "as_tensor",
}
# What may be done with logits that are not gathered: their classes stay as they are.
_LAZY = {
    "float",
    "double",
    "to",
    "contiguous",
    "view",
    "reshape",
    "flatten",
    "getitem",
    "clone",
    "type_as",
    "bfloat16",
    "half",
}
LOSSES = ("cross_entropy",)
_TAKES_SIZES = {"view", "reshape", "unflatten", "split", "chunk", "getitem", "expand", "narrow", "repeat"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class LossUse:
    """A cross-entropy between layers: of the logits of a layer that gives its classes cut, or of whole ones."""

    head: str | None
    rows: int
    nbytes: int  # of one of its numbers
    smoothing: float


class Misplaced(CutError):
    """An operation that needs what it is given in another way."""

    def __init__(
        self,
        why: str,
        makers: frozenset[str],
        place: str,
        module: str | None = None,
        sections: tuple[int, ...] = (),
        by_numbers: bool = False,
    ) -> None:
        """`sections`: of what was refused, the sizes that its last dimension is taken apart into. `by_numbers`: it takes sizes."""
        super().__init__(f"{place}: {why}" if place else why)
        self.why, self.makers, self.place, self.module = why, makers, place, module
        self.sections, self.by_numbers = sections, by_numbers


class _WithConstants(Run):
    """Tensors that are made of numbers alone, and the inputs, have values: code may ask for them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.constants: dict[int, tuple[int, Tensor]] = {}  # by id, in the order in which they were made
        self.twins: dict[int, Tensor] = {}  # by the id of one on the meta device, what has its values

    def constant(self, tensor: Tensor) -> None:
        self.constants[id(tensor)] = len(self.constants), tensor

    def known_constant(self, tensor: Tensor) -> tuple[str, int] | None:
        twin = self.twins.get(id(tensor))
        return None if twin is None or id(twin) not in self.constants else ("constant", self.constants[id(twin)][0])

    def __torch_function__(self, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._is_constant(function, args, kwargs):
            return super().__torch_function__(function, types, args, kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _HOST}
        args = tuple(_HOST if isinstance(each, torch.device) else each for each in args)
        with _HOST:
            result = function(*args, **kwargs)
        if not isinstance(result, Tensor | tuple | list) and hasattr(result, "__next__"):
            result = list(result)
        made = list[Tensor]()
        leaves(result, made, [])
        for tensor in made:
            if id(tensor) not in self.constants:
                self.constant(tensor)
        return result

    def _is_constant(self, function: Function, args: Any, kwargs: Any) -> bool:
        tensors, numbers = list[Tensor](), list[Any]()
        leaves((args, kwargs), tensors, numbers)
        if tensors:
            return all(id(tensor) in self.constants for tensor in tensors)
        sizes = [number for number in numbers if isinstance(number, int) and not isinstance(number, bool)]
        return operation_of(function).name in _MAKERS and prod(max(1, abs(size)) for size in sizes) <= _MOST_NUMBERS

    def _on_meta(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        if id(value) not in self.constants:
            twin = super()._on_meta(value)
        else:
            twin = torch.empty_like(value, device=META)
        self.twins[id(twin)] = value
        self._alive.append(twin)
        return twin

    @cached_property
    def _alive(self) -> list[Tensor]:
        return []

    def name_of(self, tensor: Tensor) -> str | None:
        """Of a parameter."""
        return self.owners.get(id(self.twins.get(id(tensor), tensor)))


class _Whole(_WithConstants, Record):
    """`between`: parameters that are used outside of the layers."""

    between: set[str]
    forwards: Counter[str]  # of modules with parameters of their own

    def _refuse(self, operation: Operation, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        self.between |= {name for tensor in tensors if (name := self.name_of(tensor)) is not None}
        if needs_values(operation, tensors):
            self.refuse(f"{operation.name.strip('_')} asks for values of a tensor, which the model is traced without")

    def known(self, tensor: Tensor) -> Any:
        return self.known_constant(tensor) or super().known(tensor)

    def layer(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        with self.paused():
            args, kwargs = torch_private.tree_map(self._on_meta, (args, kwargs))
        return super().layer(name, plain, args, kwargs)


class _AsRank(_WithConstants, Replay):
    def __init__(self, record: _Whole, placing: Placing, inputs: Mapping[str, tuple[Tensor, Tracked]]) -> None:
        super().__init__(record, placing, inputs)
        self._placing, self._whole = placing, record
        self._lazy: dict[int, str] = {}
        self._averaged: set[int] = set()
        self._rows_cut = any(tracked.axes for _, tracked in inputs.values())
        self.losses: list[LossUse] = []
        self.flops = [0.0, 0.0]  # of products between layers: of the whole, and of a rank
        self.partial: dict[
            str, frozenset[str]
        ] = {}  # of parameters used between layers: axes of which each has a summand

    def of(self, tensor: Tensor) -> Tracked:
        if id(tensor) in self._tracked:
            return self._tracked[id(tensor)]
        if (constant := self.known_constant(tensor)) is not None:
            self._keep(tensor, constant, Tracked(self._dims_of_constant(constant[1], self.twins[id(tensor)])))
        tracked = super().of(tensor)
        if (name := self.name_of(tensor)) is not None:
            tracked = self._tracked[id(tensor)] = Tracked(tracked.dims, parameters=frozenset({name}))
        return tracked

    def lies(self, tensor: Tensor) -> Tracked:
        """As `of`, also of a tensor that is made of numbers alone."""
        if id(tensor) in self.constants:
            return Tracked(self._dims_of_constant(self.constants[id(tensor)][0], tensor))
        return self.of(tensor)

    def _refuse_random(self, name: str) -> NoReturn:
        raise CutError(
            f"{where.here(self.names)}: {name} draws random numbers, and each rank would draw its own for its part: set the"
            " model's dropout to 0, or call model.eval() before it is parallelized"
        )

    def _dims_of_constant(self, number: int, own: Tensor) -> Dims:
        """One that is made of the size of a rank's samples is alike along them, or it is something else."""
        whole = next((tensor for place, tensor in self._whole.constants.values() if place == number), own)
        if whole.shape == own.shape:
            return uncut(own.shape)
        dims: list[Dim] = []
        for size, local in zip(whole.shape, own.shape, strict=True):
            if local == 0 or size % local:
                raise Refused(
                    f"a tensor of {list(own.shape)} is made on a rank, and of {list(whole.shape)} in the serial model"
                )
            dims.append((Factor(size, (), size // local),) if size != local else uncut([size])[0])
        if not torch.equal(
            own.repeat([size // local for size, local in zip(whole.shape, own.shape, strict=True)]), whole
        ):
            raise Refused(f"a tensor of {list(whole.shape)} is made that is not alike for all samples")
        return tuple(dims)

    def step(
        self,
        operation: Operation,
        function: Function,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        numbers: list[Any],
    ) -> Any:
        self._operation = operation.name
        if is_random(operation, args, kwargs):
            self._refuse_random(operation.name)
        try:
            if operation.name == "setitem" and len(tensors) > 1:
                self._specialise(*tensors[:2])
            lazy = self._lazy_input(operation, tensors)
            averaged = self._averaged_input(operation, tensors)
            if self._is_mean(operation, args, kwargs, tensors):
                averaged = True
                result = self._mean(operation, function, args, kwargs, tensors)
            else:
                result = self._step(operation, function, args, kwargs, tensors, numbers)
            if averaged and isinstance(result, Tensor):
                self._averaged.add(id(result))
            self._count_flops(operation.name, tensors, result)
        except Refused as refused:
            self._misplaced(refused, tensors)
        if operation.name in LOSSES and kwargs.get("reduction", "mean") == "mean":
            smoothing = float(kwargs.get("label_smoothing", 0.0))
            rows = tensors[0].numel() // tensors[0].shape[-1]
            self.losses.append(LossUse(lazy, rows, tensors[0].element_size(), smoothing))
        elif lazy is not None and isinstance(result, Tensor):
            if result.shape[-1:] != tensors[0].shape[-1:]:
                self._misplaced(Refused(f"{operation.name} changes classes"), tensors)
            self._lazy[id(result)] = lazy
        return result

    def _count_flops(self, name: str, tensors: list[Tensor], result: Any) -> None:
        if name not in _PRODUCTS or not isinstance(result, Tensor):
            return
        entry = self._record.entries[self._place - 1]
        own = [tuple(tensor.shape) for tensor in tensors]
        for place, shapes, out in ((0, entry.input_shapes, entry.shapes[0]), (1, own, tuple(result.shape))):
            if name == "scaled_dot_product_attention":
                self.flops[place] += 4.0 * prod(shapes[0]) * shapes[1][-2]
            else:
                self.flops[place] += 2.0 * prod(out) * shapes[name == "baddbmm"][-1]

    def _specialise(self, tensor: Tensor, value: Tensor) -> None:
        """What is made of zeros of the size of a rank's samples becomes what is assigned to it."""
        old, new = self.of(tensor), self.of(value)
        if (
            old.dims
            and new.dims
            and any(factor.ratio > 1 for factor in old.dims[0])
            and common(old.dims[0], new.dims[0])
        ):
            self._tracked[id(tensor)] = replace(old, dims=(new.dims[0], *old.dims[1:]))

    def _is_mean(self, operation: Operation, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
        """The mean over all samples, of which each rank has as many: that of a rank's own is its part of the whole's."""
        if not self._rows_cut or not any(_samples_cut(self.of(each)) for each in tensors):
            return False
        if operation.name in (*LOSSES, *pointwise.LOSSES, "nll_loss"):
            return kwargs.get("reduction", "mean") == "mean"
        return operation.name == "mean" and len(args) == 1 and not kwargs.get("dim")

    def _mean(self, operation: Operation, function: Function, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if any(axis in PLANE for each in tensors for axis in self.of(each).axes):
            raise Refused(f"{operation.name} of features that are cut")
        result = function(*args, **kwargs)
        self._next(operation.name, tensors)
        self._keep(result, (self._place - 1, 0), Tracked(()))
        return result

    def _averaged_input(self, operation: Operation, tensors: list[Tensor]) -> bool:
        """The mean of a rank's own samples may be scaled and added to others, and nothing else."""
        averaged = [id(each) in self._averaged for each in tensors]
        if not any(averaged):
            return False
        scaled = operation.name in ("mul", "div") and averaged[0] and sum(averaged) == 1
        if not scaled and operation.name not in (
            "add",
            "sub",
            "neg",
            "to",
            "float",
            "double",
            "detach",
            "clone",
            "view",
        ):
            raise Refused(f"{operation.name} of the mean of a rank's own samples is not that of the whole batch's")
        return operation.name != "detach"

    def _lazy_input(self, operation: Operation, tensors: list[Tensor]) -> str | None:
        lazy = next((self._lazy[id(each)] for each in tensors if id(each) in self._lazy), None)
        if lazy is None:
            return None
        first = id(tensors[0]) in self._lazy and not any(id(each) in self._lazy for each in tensors[1:])
        if not first or operation.name not in (*_LAZY, *LOSSES):
            raise Refused(f"{operation.name} takes logits")
        return lazy

    def layer(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        with self.paused():
            args, kwargs = torch_private.tree_map(self._on_meta, (args, kwargs))
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if any(id(each) in self._lazy for each in tensors):
            self._misplaced(Refused(f"layer {name} takes logits"), tensors)
        output = super().layer(name, plain, args, kwargs)
        if self._placing.placed[name].given == "lazy":
            self._lazy[id(output)] = name
        return output

    def refuse(self, text: str, cause: BaseException | None = None) -> Any:
        raise Misplaced(text, self._makers_now, where.here(self.names), where.module_here(self.names))

    _makers_now: frozenset[str] = frozenset()
    _operation = ""

    def _next(self, name: str, tensors: Sequence[Tensor]) -> Any:
        found = super()._next(name, tensors)
        self._makers_now = frozenset(maker for each in found[1] for maker in each.makers)
        return found

    def _misplaced(self, refused: Refused, tensors: Sequence[Tensor]) -> Any:
        makers = frozenset(
            maker for each in tensors if id(each) in self._tracked for maker in self._tracked[id(each)].makers
        ) | frozenset(self._lazy[id(each)] for each in tensors if id(each) in self._lazy)
        place, module = where.here(self.names), where.module_here(self.names)
        found, by_numbers = self._sections(tensors), self._operation in _TAKES_SIZES
        raise Misplaced(str(refused), makers, place, module, found, by_numbers) from None

    def _sections(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """How the operation that was refused takes the last dimension of its tensor apart in the serial model."""
        if not tensors or not 0 < self._place <= len(self._record.entries):
            return ()
        entry = self._record.entries[self._place - 1]
        if not entry.input_shapes:
            return ()
        size = entry.input_shapes[0][-1] if entry.input_shapes[0] else 0
        lasts = [shape[-1] for shape in entry.shapes if shape]
        if entry.name in ("split", "chunk", "tensor_split", "split_with_sizes") and sum(lasts) == size:
            return tuple(lasts)
        if entry.name == "getitem" and entry.numbers and isinstance(last := entry.numbers[-1], slice):
            start, stop, step = last.indices(size)
            ends = sorted({0, start, stop, size})
            return tuple(right - left for left, right in pairwise(ends)) if step == 1 else ()
        if entry.name in ("view", "reshape", "unflatten") and len(entry.shapes[0]) > len(entry.input_shapes[0]):
            first = entry.shapes[0][len(entry.input_shapes[0]) - 1]
            return (size // first,) * first if 1 < first <= _FEW and size % first == 0 else ()
        return ()

    def _summands(self, step: Step, dims: Dims) -> tuple[frozenset[str], frozenset[str]]:
        pairs = list(zip(step.inputs, step.needs_gradient, strict=True))
        own = frozenset(name for each, needs in pairs if needs for name in each.parameters)
        others = [(each, needs) for each, needs in pairs if not each.parameters]
        # Over samples the gradients of all parameters are averaged.
        cutting = frozenset(axis for dim in dims for factor in dim for axis, _ in factor.cutting if axis in PLANE)
        if not cutting and not any(needs for _, needs in others):
            return frozenset(), own
        for name in own:
            self.note(name, cutting)
        found = summands(step.name, [(_of_plane(each), needs) for each, needs in others], _of_plane(Tracked(dims)).dims)
        return found, frozenset()

    def note(self, name: str, axes: frozenset[str]) -> None:
        """Ranks of these axes have summands of the gradient of a parameter that is whole."""
        if self.partial.setdefault(name, axes) != axes:
            raise Refused(f"{name} is used with tensors that are cut, and with others that are not")

    def finish(self, result: Any) -> None:
        outputs = list[Tensor]()
        leaves(result, outputs, [])
        for output in outputs:
            tracked = self._tracked.get(id(output))
            if tracked is not None and any(axis in PLANE for axis in tracked.axes):
                self._misplaced(Refused("the model returns it"), [output])


def _of_plane(tracked: Tracked) -> Tracked:
    """Without the axes that cut samples."""
    dims = tuple(
        tuple(replace(factor, cutting=tuple(each for each in factor.cutting if each[0] in PLANE)) for factor in dim)
        for dim in tracked.dims
    )
    return replace(tracked, dims=dims)


def _samples_cut(tracked: Tracked) -> bool:
    return any(axis not in PLANE for axis in tracked.axes)


@dataclass
class Found:
    """Where the layers lie, and what was seen between them."""

    placed: dict[str, Placed]
    choices: Choices
    partial: Mapping[
        str, frozenset[str]
    ]  # of parameters that are used whole: axes whose ranks have summands of a gradient
    losses: list[LossUse]
    calls: Mapping[str, int]  # how often modules run
    flops: tuple[float, float]  # of products between layers: of the whole, and of a rank


def place(
    model: nn.Module,
    known: Mapping[str, Known],
    sizes: Mapping[str, int],
    inputs: Mapping[str, Any],
    tied: Mapping[str, str],
    say: Callable[[str], None] | None = None,
) -> Found:
    """Run the model as a rank until nothing is refused."""
    record, known = _recorded(model, known, inputs)
    choices = Choices()
    for _ in range(_MOST_TRIES):
        placing = Placing(known, sizes, choices, tied)
        fresh = {
            name: torch.empty_like(each) for name, each in inputs.items() if isinstance(each, Tensor) and each.is_meta
        }
        run = _AsRank(record, placing, {name: (value, Tracked(uncut(value.shape))) for name, value in fresh.items()})
        try:
            with patched(model, {pattern: made.patch for pattern, made in choices.patches.items()}):
                run.finish(_run(run, {**inputs, **fresh}))
        except CutError as error:
            misplaced = _of_last_patch(error, choices)
            if say is not None:
                say(f"{misplaced} | {sorted(set(map(pattern_of, misplaced.makers)))} {misplaced.sections}")
            if not _improve(model, placing, choices, misplaced):
                raise misplaced from None
        else:
            return Found(
                placing.placed, choices, run.partial, run.losses, record.forwards, (run.flops[0], run.flops[1])
            )
    raise CutError(f"no place was found for the layers of {type(model).__name__} in {_MOST_TRIES} tries")


def cut_samples(
    model: nn.Module,
    known: Mapping[str, Known],
    sizes: Mapping[str, int],
    inputs: Mapping[str, Any],
    tied: Mapping[str, str],
    found: Found,
    samples: int,
) -> str | None:
    """Run the model once more on a part of the samples: where it computes something else of them than of all, in words.

    The layers then know which of their rows are as many for any number of samples.
    """
    try:
        placed = some_samples(model, known, sizes, inputs, tied, found, samples)
    except CutError as error:
        return str(error)
    for name, each in placed.items():
        for use, here in zip(found.placed[name].uses, each.uses, strict=True):
            use.fixed = here.fixed
    return None


# What watches a run: it is given what is known of a tensor, and for which part of the samples.
Watch = Callable[[Callable[[Tensor], Tracked], int], AbstractContextManager[None]]


def some_samples(
    model: nn.Module,
    known: Mapping[str, Known],
    sizes: Mapping[str, int],
    inputs: Mapping[str, Any],
    tied: Mapping[str, str],
    found: Found,
    samples: int,
    watch: Watch | None = None,
) -> dict[str, Placed]:
    """A run of a rank that has some of the samples. Raises CutError where it computes something else of them than of all."""
    parts = next(each for each in range(2, samples + 1) if samples % each == 0)
    empty = {name: each.to("meta") if isinstance(each, Tensor) else each for name, each in inputs.items()}
    given: dict[str, tuple[Tensor, Tracked]] = {}
    placing = Placing(known, sizes, found.choices, tied)
    record, _ = _recorded(model, known, empty)
    for name, each in empty.items():
        if isinstance(each, Tensor):
            cut = each.dim() > 0 and each.shape[0] == samples
            dims = ((Factor(samples, (("data", parts),)),), *uncut(each.shape[1:])) if cut else uncut(each.shape)
            given[name] = torch.empty(local_shape(dims), dtype=each.dtype, device=META), Tracked(dims)
    run = _AsRank(record, placing, given)
    with (
        patched(model, {pattern: made.patch for pattern, made in found.choices.patches.items()}),
        nullcontext() if watch is None else watch(run.lies, samples // parts),
    ):
        run.finish(_run(run, {**empty, **{name: tensor for name, (tensor, _) in given.items()}}))
    return placing.placed


def _recorded(
    model: nn.Module, known: Mapping[str, Known], inputs: Mapping[str, Any]
) -> tuple[_Whole, dict[str, Known]]:
    """The whole run; a layer whose parameters are used outside of it is none."""
    while True:
        record = _Whole(model, list(known), {name: each for name, each in inputs.items() if _is_empty(each)})
        record.between = set()
        with _counting(model) as record.forwards:
            _run(record, inputs)
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


def _run(run: _WithConstants, inputs: Mapping[str, Any]) -> Any:
    """What is drawn at random is the same in each run."""
    for value in inputs.values():
        if isinstance(value, Tensor) and not value.is_meta:
            run.constant(value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run.run(inputs)


def _improve(model: nn.Module, placing: Placing, choices: Choices, misplaced: Misplaced) -> bool:
    """Try another thing; False where there is none.

    First what the layer's outputs are made of, then numbers that the module holds, and then how the layer lies that is most cut
    of those that made what was refused, of several the last.
    """
    makers = [name for name, each in placing.placed.items() if name in misplaced.makers and each.given != "whole"]
    if not makers:
        return _take_back(choices, misplaced)
    name = min(reversed(makers), key=lambda maker: placing.placed[maker].level)
    placed, pattern = placing.placed[name], pattern_of(name)
    cut = placed.given in ("both", "one")
    if cut and isinstance(placed.known, Linear) and _take_apart(choices, pattern, placed.known, misplaced.sections):
        return True
    way = (placed.side, placed.given)
    if cut and misplaced.by_numbers and misplaced.module and misplaced.module == name.rpartition(".")[0]:
        made = choices.patches.get(pattern_of(misplaced.module))
        if _patch(
            model, choices, misplaced.module, placing.parts(placed), made.maker if made is not None else (name, way)
        ):
            return True
    choices.bar(name, way, misplaced.why)
    for module, made in list(choices.patches.items()):
        if made.maker == (name, way):
            del choices.patches[module]
    return True


def _of_last_patch(error: CutError, choices: Choices) -> Misplaced:
    """The model's own code refuses numbers that were changed."""
    if isinstance(error, Misplaced):
        return error
    if not choices.patches or "draws random numbers" in str(error):
        raise error
    return Misplaced(str(error), frozenset(), "", next(reversed(choices.patches)))


def _take_back(choices: Choices, misplaced: Misplaced) -> bool:
    """Numbers that were changed for one layer do not fit what is whole."""
    pattern = pattern_of(misplaced.module or "")
    if pattern not in choices.patches:
        return False
    name, way = choices.patches.pop(pattern).maker
    choices.bar(name, way, misplaced.why)
    return True


def _take_apart(choices: Choices, pattern: str, linear: Linear, sections: tuple[int, ...]) -> bool:
    """Together with what is known of them."""
    if len(sections) < 2 or sum(sections) != linear.n:
        return False
    before = choices.sections.get(pattern, ())
    ends = sorted({*accumulate(sections), *accumulate(before)})
    found = tuple(right - left for left, right in pairwise([0, *ends]))
    choices.sections[pattern] = found
    return found != before


def _patch(model: nn.Module, choices: Choices, name: str, parts: int, maker: tuple[str, Way]) -> bool:
    pattern = pattern_of(name)
    made = choices.patches.get(pattern)
    stage = 0 if made is None else made.stage
    while parts > 1 and stage < STAGES:
        stage += 1
        patch = patch_of(model.get_submodule(name), stage, parts)
        if patch is not None and (made is None or patch != made.patch):
            choices.patches[pattern] = Patched(patch, stage, maker)
            return True
    return False
