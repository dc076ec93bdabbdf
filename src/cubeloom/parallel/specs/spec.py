"""What a kind of layer says of itself, from which everything else follows.

A `LayerSpec` has the sizes of one layer, the same on every grid. It states the layouts of what the layer takes and gives and
of its parameters, which redistributions it performs in each pass, and what its sizes must divide. From these follow the
collectives of the layer that trains, the bytes that `verify` and the planner predict, the axes over which gradients are
summed, the blocks of a checkpoint and what a pipeline's stages hand on. No torch here: a plan is found without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

from cubeloom.parallel.arrangement import Arrangement
from cubeloom.parallel.config import Element, ParallelConfig
from cubeloom.parallel.layout import Axes, Layout, Operation, local_elements, redistribute

Side = Literal["x", "y"]
Phase = Literal["F", "I", "W"]  # forward, input gradient, weight gradient
ROWS: Axes = ("data", "z")  # the axes that cut samples wherever an activation lies


def other(side: Side) -> Side:
    return "y" if side == "x" else "x"


def rows_of(side: Side, sharded: bool) -> Axes:
    """The axes that cut the rows of an activation whose features lie on this side."""
    return (*ROWS, other(side)) if sharded else ROWS


def stream(side: Side, sharded: bool) -> Layout:
    """An activation at rest, features on this side: rows are cut further along the other axis, or replicated along it."""
    return Layout.of(rows=rows_of(side, sharded), features=side)


@dataclass(frozen=True)
class Transfer:
    """A redistribution of a tensor that a layer performs in one pass of a micro-batch; `elements` are those of the whole."""

    phase: Phase
    source: Layout
    target: Layout
    elements: Any
    element: Element = "item"
    when: Any = True  # on which decompositions
    of_weight: bool = False  # gathered ahead or scattered behind, while other layers compute
    gathered_to_keep: bool = False  # only where the weight is not at hand already


@dataclass(frozen=True)
class Collective:
    """One collective of a transfer, on one rank. `nbytes` are those of its larger side, 0 where there is none.

    Of an exchange (`Layout.redistribute`) they are those that the rank receives.
    """

    phase: Phase
    operation: Operation
    axes: Axes
    nbytes: Any
    received: Any
    of_weight: bool = False
    gathered_to_keep: bool = False
    exchange: bool = False


def _as_it_is() -> None:
    return None


@dataclass(frozen=True)
class Parameter:
    """A parameter at rest: its whole shape, dimension by dimension, how it lies, and where its gradient is a partial sum.

    `when`: on which decompositions it lies so; on each, exactly one of the parameters of a name does.
    """

    name: str
    shape: tuple[Any, ...]  # of what all ranks hold together
    layout: Layout  # of as many dimensions as are cut; those behind are whole
    partial: Axes  # the axes over which the gradient is summed once a step
    when: Any = True
    arranged: Callable[[], Arrangement | None] = _as_it_is  # how its rows lie, where not as in the whole tensor
    alike: Axes = ()  # of `partial`, those whose ranks have the same gradient: it is averaged over them
    trained: bool = True  # whether a step makes a gradient of it

    def numbers(self, c: ParallelConfig) -> Any:
        """How many a rank holds."""
        return local_elements(prod(self.shape), self.layout, c.size)

    def rows(self, c: ParallelConfig) -> Any:
        """Of the block that a rank holds."""
        first, axes = self.layout.dims[0]
        return local_elements(self.shape[0], Layout(((first, axes),)), c.size)

    @property
    def cuts(self) -> dict[str, int]:
        """The dimension that each axis cuts."""
        return {axis: dim for dim, (_, axes) in enumerate(self.layout.dims) for axis in axes}


@dataclass(frozen=True)
class Rule:
    """Something that sizes must divide: where it is broken, its name in a table, and in words for one decomposition."""

    label: str
    broken: Any
    words: Callable[[], str]


@dataclass(frozen=True)
class Product:
    """A matrix product of local blocks, `[rows, k] · [k, n]`, with `kernel_numel` numbers for each pair of features."""

    rows: Any
    k: Any
    n: Any
    kernel_numel: Any = 1


@dataclass(frozen=True)
class Touched:
    """Bytes that memory-bound operators of one micro-batch read and write on a rank, in each pass."""

    forward: Any = 0.0
    input_grad: Any = 0.0
    weight_grad: Any = 0.0
    operators: int = 2  # of a forward; each gradient has as many


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    name: str

    kinds: ClassVar[dict[str, type[LayerSpec]]] = {}  # by name, as a file of layers has them

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        LayerSpec.kinds[cls.__name__.removesuffix("Spec")] = cls

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        """The layouts of the tensors that it is called with, on one decomposition.

        Dimensions are named: `rows` is the first one, `features` the one that the layer treats as features; others are whole.
        """
        return ()

    def gives(self, c: ParallelConfig) -> Layout | None:
        """The layout of its output, on one decomposition. None: it is no layer of the cube, but lies between them."""
        return None

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        yield from ()

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        yield from ()

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from ()

    def products(self, c: ParallelConfig) -> Iterator[Product]:
        """Those of a forward, on one rank."""
        yield from ()

    def touched(self, c: ParallelConfig) -> Touched | None:
        """What it reads and writes beside its products; None: nothing."""
        raise TypeError(f"{type(self).__name__} does not say which bytes it reads and writes")

    def saved(self, c: ParallelConfig) -> Any:
        """Bytes that a rank keeps from a forward to its backward."""
        raise TypeError(f"{type(self).__name__} does not say what it keeps for its backward")

    def flops(self, sequence: int) -> float:
        """Multiplications and additions of the forward of one sample of the serial model."""
        return 0.0


def there_and_back(
    source: Layout,
    target: Layout,
    elements: Any,
    *,
    element: Element = "item",
    when: Any = True,
    back: Phase = "I",
    back_when: Any = True,
) -> Iterator[Transfer]:
    """A redistribution in the forward, and its backward."""
    yield Transfer("F", source, target, elements, element, when)
    yield Transfer(back, target.gradient, source.gradient, elements, element, when & back_when)


def collectives(spec: LayerSpec, c: ParallelConfig) -> Iterator[Collective]:
    """What a layer communicates in one forward and backward, without the sums of gradients over replicas."""
    for each in spec.transfers(c):
        if each.when is False:
            continue
        nbytes = each.elements * c.bytes_of(each.element) * each.when
        for move in redistribute(each.source, each.target):
            received = move.received(nbytes, c.size, c.coordinates)
            if move.operation == "slice":
                continue
            local = received if move.exchange else local_elements(nbytes, move.larger, c.size)
            yield Collective(
                each.phase,
                move.operation,
                move.axes,
                local,
                received,
                each.of_weight,
                each.gathered_to_keep,
                move.exchange,
            )


def parameters(spec: LayerSpec, c: ParallelConfig) -> dict[str, Parameter]:
    """Those of one decomposition, by name."""
    return {each.name: each for each in spec.parameters(c) if each.when}


def cut_share(specs: Iterable[LayerSpec], c: ParallelConfig) -> float:
    """The share of the parameters, counted by numbers, that every axis of x, y and z cuts which has more than one rank."""
    axes = {axis for axis in ("x", "y", "z") if c.size(axis) > 1}
    own = {name: each for spec in specs for name, each in parameters(spec, c).items()}
    sizes = {name: prod(each.shape) for name, each in own.items()}
    cut = sum(size for name, size in sizes.items() if axes <= own[name].cuts.keys())
    return float(cut / sum(sizes.values()))


def divides(label: str, what: str, size: Any, c: ParallelConfig, *axes: str, when: Any = True) -> Iterator[Rule]:
    """`size` must be a multiple of what these axes have together."""

    def words() -> str:
        cut = "·".join(f"{axis}={getattr(c, axis)}" for axis in axes if getattr(c, axis) > 1)
        return f"{what} {size} cannot be cut over {cut}"

    yield Rule(label, (size % c.size(*axes) != 0) & when, words)
