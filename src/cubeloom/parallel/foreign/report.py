"""A proposal in words: a table of layers, those of one name with other numbers in one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction

from cubeloom.base.grid import Grid
from cubeloom.parallel.cut import pattern_of
from cubeloom.parallel.foreign.cost import layer_volume, total, whole_volume
from cubeloom.parallel.foreign.placed import Placed, Whole
from cubeloom.parallel.volume import Volume

# Name, how many, how it lies, numbers it has, bytes.
_Row = tuple[str, str, str, str, str]


def table(layers: Iterable[Placed], whole: Iterable[Whole], grid: Grid, item: int) -> Iterator[str]:
    """A line for each kind of layer, first those that are cut."""
    cut = [(each.name, how(each, grid), each.numbers, total(layer_volume(each, grid, item))) for each in layers]
    left = [(each.name, each.why, each.numbers, total(whole_volume(each, grid, item))) for each in whole]
    sections = [("cut", _rows(cut)), ("left whole", _rows(left))]
    rows = [row for _, section in sections for row in section]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    for title, section in sections:
        if section:
            yield f"{title}:"
        for name, times, lies, numbers, size in section:
            yield (
                f"  {name:<{widths[0]}} {times:>{widths[1]}}  {lies:<{widths[2]}}"
                f"  {numbers:>{widths[3]}} numbers  {size:>{widths[4]}} bytes"
            )


def how(layer: Placed, grid: Grid) -> str:
    """From where to where features go, and what happens at the ends of a chain."""
    spec = layer.spec
    lies = f"{spec.k_axis} to {spec.n_axis}"
    before = "own features, " if layer.enters and grid.size(spec.k_axis) > 1 else ""
    ends = "gathered" if grid.size(spec.n_axis) > 1 else "whole"
    after = f", {ends}: {layer.why}" if layer.leaves else ", stays cut"
    shards = "; not cut over z" if grid.z > 1 and not layer.sharded else ""
    return f"{before}{lies}{after}{shards}"


def bytes_by_axis(volume: Volume) -> str:
    return ", ".join(f"{axis} {number(size)}" for axis, size in sorted(volume.items())) or "none"


def number(size: Fraction | int) -> str:
    return f"{round(size):,}"


def _rows(entries: list[tuple[str, str, int, Fraction]]) -> list[_Row]:
    groups: dict[tuple[str, str], list[tuple[int, Fraction]]] = defaultdict(list)
    for name, lies, numbers, size in entries:
        groups[pattern_of(name), _anonymous(lies)].append((numbers, size))
    return [
        (
            name or "(the model itself)",
            f"×{len(found)}",
            lies,
            number(sum(numbers for numbers, _ in found)),
            number(sum((size for _, size in found), Fraction())),
        )
        for (name, lies), found in groups.items()
    ]


def _anonymous(text: str) -> str:
    """Names in a sentence with their numbers as `*`."""
    return " ".join(pattern_of(word) if "." in word else word for word in text.split(" "))
