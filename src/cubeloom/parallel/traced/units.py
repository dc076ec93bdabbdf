"""The modules between which a pipeline cuts a model: its rows of blocks, and the modules beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from cubeloom.base.errors import UserError
from cubeloom.parallel.traced.styles import carried_rows

_ROWS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Units:
    """`units`: modules with parameters or layers, none inside another; `blocks`: those of them that are in a row.

    `owners`: modules around them that have parameters of their own.
    """

    units: tuple[str, ...]
    blocks: frozenset[str]
    owners: tuple[str, ...]

    def owner_of(self, parameter: str) -> str:
        """The unit that has this parameter, or the module around units."""
        inside = (unit for unit in self.units if parameter.startswith(f"{unit}."))
        return next(inside, parameter.rpartition(".")[0])


def units_of(model: nn.Module, layers: Iterable[str] = ()) -> Units:
    """`layers` by name, because some have no parameters. Raises UserError if the model has no row of blocks."""
    rows = [(name, model.get_submodule(name)) for name in carried_rows(model)] or list(_rows("", model))
    deep = [row for row in rows if any(map(_is_deep, row[1].children()))]
    rows = deep or rows
    if not rows:
        raise UserError(
            f"{type(model).__name__} has no row of blocks that a pipeline could cut: no nn.ModuleList or nn.Sequential with"
            " several modules that have parameters"
        )
    around = {"", *(part for name, _ in rows for part in _beginnings(name))}
    inside = {name for name, _ in rows}
    inner = {part for layer in layers for part in _beginnings(layer)}
    units = list(_units("", model, around, inner, set()))
    blocks = frozenset(name for name in units if name.rpartition(".")[0] in inside)
    owners = [name for name in around if any(True for _ in model.get_submodule(name).parameters(recurse=False))]
    return Units(tuple(units), blocks, tuple(sorted(owners)))


def _rows(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Outermost rows, and rows directly inside a row."""
    is_row = isinstance(module, _ROWS) and sum(map(_has_parameters, module.children())) > 1
    if is_row:
        yield name, module
    for own, child in module.named_children():
        if not is_row or isinstance(child, _ROWS):
            yield from _rows(f"{name}.{own}".lstrip("."), child)


def _beginnings(name: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c`."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _units(name: str, module: nn.Module, around: set[str], inner: set[str], seen: set[int]) -> Iterator[str]:
    for own, child in module.named_children():
        full = f"{name}.{own}".lstrip(".")
        if full in around or isinstance(child, nn.ModuleList | nn.ModuleDict):  # which are not called
            yield from _units(full, child, around, inner, seen)
        elif (full in inner or _has_parameters(child)) and id(child) not in seen:
            seen.add(id(child))
            yield full


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_deep(module: nn.Module) -> bool:
    """Whether it has modules with parameters inside: a block, and not a layer."""
    return _has_parameters(module) and any(map(_has_parameters, module.children()))
