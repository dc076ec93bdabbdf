"""`LayerSpec`: what each kind of layer states about itself. Everything else follows from it.

A spec has the sizes of one layer, the same on every grid. It states the layouts of the layer's inputs, output and
parameters, the redistributions in each pass, and the divisibility rules. From these follow the collectives during
training, the bytes that `verify` and the planner predict, the axes of gradient reductions, the blocks of a checkpoint
and the tensors between pipeline stages. Specs do not use torch, so the planner works without it.
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
ROWS: Axes = ("data", "z")  # the axes that cut the samples of every activation


def other(side: Side) -> Side:
    return "y" if side == "x" else "x"


def rows_of(side: Side, sharded: bool) -> Axes:
    """The axes that cut the rows of an activation whose features are on this side."""
    return (*ROWS, other(side)) if sharded else ROWS


def stream(side: Side, sharded: bool) -> Layout:
    """A stored activation with features on this side. Along the other axis its rows are cut further, or replicated."""
    return Layout.of(rows=rows_of(side, sharded), features=side)


@dataclass(frozen=True)
class Transfer:
    """A redistribution that a layer performs in one pass of a micro-batch. `elements` counts the whole tensor."""

    phase: Phase
    source: Layout
    target: Layout
    elements: Any
    element: Element = "item"
    when: Any = True  # the decompositions that need it
    of_weight: bool = False  # prefetched, or reduce-scattered later, while other layers compute
    gathered_to_keep: bool = False  # only if the gathered weight is not kept


@dataclass(frozen=True)
class Collective:
    """One collective of a transfer, on one rank. `nbytes` is the size of its larger side, 0 if there is no collective.

    For an exchange (`Layout.redistribute`) it is what the rank receives.
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
    """A stored parameter: the shape of the whole, its layout, and the axes over which its gradient is a partial sum.

    `when`: the decompositions on which it has this layout. On each, exactly one parameter of a name applies.
    """

    name: str
    shape: tuple[Any, ...]  # over all ranks together
    layout: Layout  # of the dimensions that are cut; the later ones are whole
    partial: Axes  # the axes over which the gradient is reduced once a step
    when: Any = True
    arranged: Callable[[], Arrangement | None] = _as_it_is  # the order of its rows, if it differs from the whole tensor
    alike: Axes = ()  # those of `partial` whose ranks have equal gradients, which are averaged
    trained: bool = True  # whether a step computes its gradient

    def numbers(self, c: ParallelConfig) -> Any:
        """The number of elements on a rank."""
        return local_elements(prod(self.shape), self.layout, c.size)

    def rows(self, c: ParallelConfig) -> Any:
        """The number of rows of a rank's block."""
        first, axes = self.layout.dims[0]
        return local_elements(self.shape[0], Layout(((first, axes),)), c.size)

    @property
    def cuts(self) -> dict[str, int]:
        """The dimension that each axis cuts."""
        return {axis: dim for dim, (_, axes) in enumerate(self.layout.dims) for axis in axes}


@dataclass(frozen=True)
class Rule:
    """A divisibility rule: where it is broken, its label in a table, and its message for one decomposition."""

    label: str
    broken: Any
    words: Callable[[], str]


@dataclass(frozen=True)
class Product:
    """A matmul of local blocks, `[rows, k] · [k, n]`, with `kernel_numel` elements per pair of features."""

    rows: Any
    k: Any
    n: Any
    kernel_numel: Any = 1


@dataclass(frozen=True)
class Touched:
    """Bytes that memory-bound operators of one micro-batch read and write on a rank, per pass."""

    forward: Any = 0.0
    input_grad: Any = 0.0
    weight_grad: Any = 0.0
    operators: int = 2  # in a forward; each gradient has as many


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    name: str

    kinds: ClassVar[dict[str, type[LayerSpec]]] = {}  # by the name that files of layers use

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        LayerSpec.kinds[cls.__name__.removesuffix("Spec")] = cls

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        """The layouts of its input tensors, on one decomposition.

        Dimensions are named: `rows` is the first one, `features` the one that the layer treats as features. Others are
        whole.
        """
        return ()

    def gives(self, c: ParallelConfig) -> Layout | None:
        """The layout of its output, on one decomposition. None for an operation between layers."""
        return None

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        yield from ()

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        yield from ()

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from ()

    def products(self, c: ParallelConfig) -> Iterator[Product]:
        """The matmuls of a forward on one rank."""
        yield from ()

    def touched(self, c: ParallelConfig) -> Touched | None:
        """What it reads and writes besides its matmuls; None if nothing."""
        raise TypeError(f"{type(self).__name__} does not say which bytes it reads and writes")

    def saved(self, c: ParallelConfig) -> Any:
        """Bytes that a rank keeps from a forward to its backward."""
        raise TypeError(f"{type(self).__name__} does not say what it keeps for its backward")

    def flops(self, sequence: int) -> float:
        """Forward FLOPs of one sample of the serial model."""
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
    gathered: Element | None = None,
) -> Iterator[Transfer]:
    """A redistribution in the forward, and its backward. `gathered`: what all-gathers move instead of `element`."""
    forward, backward = (source, target), (target.gradient, source.gradient)
    yield Transfer("F", *forward, elements, _moved(forward, element, gathered), when)
    yield Transfer(back, *backward, elements, _moved(backward, element, gathered), when & back_when)


def _moved(layouts: tuple[Layout, Layout], element: Element, gathered: Element | None) -> Element:
    gathers = gathered is not None and any(move.operation == "all_gather" for move in redistribute(*layouts))
    return gathered if gathers and gathered is not None else element


def collectives(spec: LayerSpec, c: ParallelConfig) -> Iterator[Collective]:
    """The collectives of a layer in one forward and backward, without gradient reductions over replicas."""
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
    """The parameters on one decomposition, by name."""
    return {each.name: each for each in spec.parameters(c) if each.when}


def cut_share(specs: Iterable[LayerSpec], c: ParallelConfig) -> float:
    """The share of the elements of all parameters that are cut by every one of x, y and z with more than one rank."""
    axes = {axis for axis in ("x", "y", "z") if c.size(axis) > 1}
    own = {name: each for spec in specs for name, each in parameters(spec, c).items()}
    sizes = {name: prod(each.shape) for name, each in own.items()}
    cut = sum(size for name, size in sizes.items() if axes <= own[name].cuts.keys())
    return float(cut / sum(sizes.values()))


def divides(label: str, what: str, size: Any, c: ParallelConfig, *axes: str, when: Any = True) -> Iterator[Rule]:
    """`size` must be a multiple of the number of ranks on these axes."""

    def words() -> str:
        cut = "·".join(f"{axis}={getattr(c, axis)}" for axis in axes if getattr(c, axis) > 1)
        return f"{what} {size} cannot be cut over {cut}"

    yield Rule(label, (size % c.size(*axes) != 0) & when, words)
