"""`cut(module, grid, example)`: where the layers of a module that others wrote could lie on a grid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.parallel.cut import CutError
from cubeloom.parallel.foreign.chains import place
from cubeloom.parallel.foreign.known import Sizes, sizes_of, why_not
from cubeloom.parallel.foreign.placed import Placed, Whole, problems, sharded, spec_of
from cubeloom.parallel.foreign.proposal import Proposal
from cubeloom.parallel.foreign.trace import Example, trace
from cubeloom.parallel.foreign.whole import held_elsewhere
from cubeloom.parallel.resolution import near
from cubeloom.parallel.specs import Side


def cut(module: nn.Module, grid: Grid, example: Example) -> Proposal:
    """Look at the module while it computes `example`, and propose where each of its layers lies on the grid.

    `example`: the keyword arguments of one forward, with as many samples as one rank of data and z will get; or a function
    that is given the module and calls it. The module may be on the meta device, and is left as it was. Nothing is sent.
    """
    if grid.pipe > 1:
        raise UserError(f"a foreign model has no stages: the grid {grid} has pipe={grid.pipe}")
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise UserError(f"this {type(module).__name__} is cut already")
    for name, each in module.named_modules():
        if (where := held_elsewhere(each)) is not None:
            raise CutError(
                f"{name} ({type(each).__name__}) holds its parameters in {where} too, where they cannot be cut"
            )
    known = {name: sizes for name, each in module.named_modules() if name and (sizes := sizes_of(each)) is not None}
    refused = _shared(module) | {
        name: why for name in known if (why := why_not(module.get_submodule(name))) is not None
    }
    seen = trace(module, known, example)
    item = next((parameter.element_size() for parameter in module.parameters()), 4)
    layers, left = place(seen, known, refused, grid, item)
    whole = tuple(_whole(module, {layer.name for layer in layers}, left, seen.used))
    _refuse_idle_axes(type(module).__name__, known, layers, whole, grid)
    return Proposal(type(module).__name__, grid, tuple(layers), whole, item, seen.losses)


def _refuse_idle_axes(
    model: str, known: Mapping[str, Sizes], layers: Sequence[Placed], whole: Sequence[Whole], grid: Grid
) -> None:
    """Ranks along an axis that cuts nothing would hold, and on x and y compute, all the same."""
    idle = [axis for axis in ("x", "y") if grid.size(axis) > 1 and not layers]
    if grid.z > 1 and not any(layer.sharded for layer in layers):
        idle.append("z")
    if not idle:
        return
    reasons = sorted(whole, key=lambda each: each.name not in known)[:3]  # first of layers that could be cut elsewhere
    why = "; ".join(f"{each.name or 'it'}: {each.why}" for each in reasons) or "weights that z does not divide"
    working = [each for each in near(grid) if each.cube > 1 and _cuts_something(known, each)]
    advice = f"grids that cut something: {'; '.join(map(str, working[:3]))}" if working else "no grid near it does"
    raise CutError(
        f"{model} on {grid}: nothing would be cut along {' and '.join(idle)} ({why}); {advice}. Ranks that only take other"
        " samples are `data`"
    )


def _cuts_something(known: Mapping[str, Sizes], grid: Grid) -> bool:
    """Along each of its axes, as far as sizes tell."""
    sides: tuple[Side, Side] = ("x", "y")
    specs = [spec_of(name, sizes, side) for name, sizes in known.items() for side in sides]
    cut = [spec for spec in specs if not problems(spec, grid)]
    return bool(cut) and (grid.z == 1 or any(sharded(spec, grid) for spec in cut))


def _shared(module: nn.Module) -> dict[str, str]:
    """Modules one of whose own parameters another has too."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, each in module.named_modules():
        for parameter in torch_private.parameters_of(each).values():
            if parameter is not None and name not in owners[id(parameter)]:
                owners[id(parameter)].append(name)
    found: dict[str, str] = {}
    for names in owners.values():
        for name in names if len(names) > 1 else ():
            rest = ", ".join(each or "the model itself" for each in names if each != name)
            found.setdefault(name, f"it shares a parameter with {rest}")
    return found


def _whole(module: nn.Module, cut: set[str], left: Mapping[str, str], used: set[int]) -> Iterator[Whole]:
    """The other modules with parameters of their own. Of a shared parameter the first has the numbers."""
    counted: set[int] = set()
    for name, each in module.named_modules():
        own = [parameter for parameter in torch_private.parameters_of(each).values() if parameter is not None]
        if name in cut or not own:
            continue
        new = [parameter for parameter in own if id(parameter) not in counted]
        counted |= {id(parameter) for parameter in own}
        trained = [parameter for parameter in new if parameter.requires_grad and id(parameter) in used]
        numbers, summed = (sum(parameter.numel() for parameter in some) for some in (new, trained))
        yield Whole(name, type(each).__name__, left.get(name) or _why(each), numbers, summed)


def _why(module: nn.Module) -> str:
    if sizes_of(module) is not None:
        return "it is the model itself"
    words = f"{type(module).__name__} has no form here"
    if isinstance(module, torch_private.AnyBatchNorm):
        return f"{words}; its statistics are of the rank's own samples"
    return words
