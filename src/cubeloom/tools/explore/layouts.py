"""The view Layouts: the layers of a model on a grid, which rank holds which block, and what each layer moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, get_args

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.base.limits import within
from cubeloom.parallel.config import Activations, Batch, Inputs, ParallelConfig, ShardingPolicy, Weights
from cubeloom.parallel.layout import Axes, Layout
from cubeloom.parallel.specs import LayerSpec, Parameter, collectives, parameters
from cubeloom.parallel.volume import layer_volume
from cubeloom.plan.hardware.device import SIZES
from cubeloom.plan.model import Model, load, names
from cubeloom.plan.search import planned_dtype
from cubeloom.tools.explore.plans import DTYPES, of_folder
from cubeloom.tools.explore.query import Query

_RANKS = 64  # that a page draws
_AXES = ("data", "z", "y", "x")
_PHASES = {"F": "forward", "I": "input gradient", "W": "weight gradient"}
POLICY = {"activations": get_args(Activations), "weights": get_args(Weights), "inputs": get_args(Inputs)}


def choices() -> dict[str, Any]:
    return {**POLICY, "most": _RANKS}


def laid_out(asked: Query) -> dict[str, Any]:
    grid = Grid(data=asked.whole("data", 1), z=asked.whole("z", 2), y=asked.whole("y", 2), x=asked.whole("x", 2))
    if grid.world > _RANKS:
        raise UserError(f"the grid {grid} has {grid.world:,} ranks: a page draws at most {_RANKS}")
    model = _model(asked.get("model", "gpt-tiny"), grid)
    c = _config(asked, grid, model)
    _refuse(model, grid, c)
    counts = [model.row.count(kind) for kind in range(len(model.kinds))]
    return {
        "title": f"{model.name} on {grid}",
        "grid": {axis: grid.size(axis) for axis in _AXES},
        "ranks": [grid.coordinates(rank) for rank in range(grid.world)],
        "samples": int(c.samples),
        "sequence": c.sequence,
        "tokens": model.tokens,
        "pieces": [
            {"count": count, "block": kind.block, "layers": [_layer(layer, grid, c) for layer in kind.layers]}
            for kind, count in zip(model.kinds, counts, strict=True)
        ],
    }


def _model(name: str, grid: Grid) -> Model:
    if name in names():
        return load(name)
    found = of_folder(name)
    found.trace({(grid.x, grid.y)})
    try:
        return found.on(grid.world).on(grid.x, grid.y)
    except KeyError:
        raise UserError(f"{name} cannot be cut over x={grid.x} and y={grid.y}; try fewer ranks of x and y") from None


def _config(asked: Query, grid: Grid, model: Model) -> ParallelConfig:
    samples = asked.whole("samples", grid.data * grid.z * grid.x * grid.y)
    sequence = asked.whole("sequence", model.sequence)
    within("samples", samples)
    within("the sequence", sequence, most=model.sequence)
    given = {name: asked.choice(name, legal) for name, legal in POLICY.items()}
    if model.planes is not None:
        given["activations"] = "replicated"  # of a model whose cut is found
    policy = ShardingPolicy(**given)  # type: ignore[arg-type]
    item = SIZES[planned_dtype(asked.choice("dtype", DTYPES))]
    return ParallelConfig.exact(grid, policy, Batch(samples, sequence), item)


def _refuse(model: Model, grid: Grid, c: ParallelConfig) -> None:
    if c.samples % (grid.data * grid.z):
        raise UserError(
            f"{int(c.samples)} samples do not divide over data={grid.data} and z={grid.z}: take a multiple of "
            f"{grid.data * grid.z}"
        )
    broken = [
        (layer.name, rule.words())
        for kind in model.kinds
        for layer in kind.layers
        for rule in layer.rules(c)
        if rule.broken
    ]
    if broken:
        layer, words = broken[0]
        more = f" (and {len(broken) - 1} more like it)" if len(broken) > 1 else ""
        raise UserError(f"grid {grid}: layer {layer}: {words}{more}")


def _layer(layer: LayerSpec, grid: Grid, c: ParallelConfig) -> dict[str, Any]:
    given = layer.gives(c)
    moved = {axis: float(size) for axis, size in layer_volume(layer, c).items() if size}
    return {
        "name": layer.name,
        "kind": type(layer).__name__.removesuffix("Spec"),
        "shares": getattr(layer, "shares", None),
        "takes": [_words(each, grid) for each in layer.takes(c)],
        "gives": "" if given is None else _words(given, grid),
        "parameters": [_parameter(each, grid, c) for each in _owned(layer, c)],
        "moved": moved,
        "collectives": list(_collectives(layer, c)),
    }


def _words(layout: Layout, grid: Grid) -> str:
    return str(layout.on(grid.sizes))


def _owned(layer: LayerSpec, c: ParallelConfig) -> Iterable[Parameter]:
    return (each for each in parameters(layer, c).values() if each.name.startswith(f"{layer.name}."))


def _parameter(each: Parameter, grid: Grid, c: ParallelConfig) -> dict[str, Any]:
    """`blocks`: for each rank, which part of each dimension it stores."""
    cuts = [tuple(axis for axis in axes if grid.size(axis) > 1) for _, axes in each.layout.dims]
    parts = [prod(grid.size(axis) for axis in axes) for axes in cuts]
    shape = [int(size) for size in each.shape]
    while len(shape) > len(cuts) and shape[-1] == 1:
        shape.pop()
    return {
        "name": each.name,
        "shape": shape,
        "cuts": ["·".join(axes) for axes in cuts],
        "parts": parts,
        "blocks": [[_part(axes, grid, rank) for axes in cuts] for rank in range(grid.world)],
        "numel": prod(shape),
        "bytes": float(each.numbers(c)) * c.item,
        "rows": _rows(each, parts),
    }


def _rows(each: Parameter, parts: Sequence[int]) -> dict[str, Any] | None:
    """Where rows (or columns) do not lie in order: those of the whole tensor that each part has, and its padding."""
    arranged = each.arranged()
    if arranged is None:
        return None
    size = arranged.held // parts[arranged.dim]
    runs = [arranged.runs(part * size, (part + 1) * size) for part in range(parts[arranged.dim])]
    return {
        "dim": arranged.dim,
        "of": [[None if run.first is None else [run.first, run.first + run.length] for run in some] for some in runs],
    }


def _part(axes: Axes, grid: Grid, rank: int) -> int:
    """The rank's part of a dimension that these axes cut, outermost first."""
    place, coordinates = 0, grid.coordinates(rank)
    for axis in axes:
        place = place * grid.size(axis) + coordinates[axis]
    return place


def _collectives(layer: LayerSpec, c: ParallelConfig) -> Iterator[dict[str, Any]]:
    for each in collectives(layer, c):
        if each.received:
            yield {
                "phase": _PHASES[each.phase],
                "operation": each.operation.replace("_", "-"),
                "axes": "·".join(axis for axis in each.axes if c.size(axis) > 1),
                "of": "weight" if each.of_weight else "activation",
                "received": float(each.received),
            }
