"""From a model, its cut and a grid to the spec of every layer; or to a clear refusal, before anything starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cubeloom.base import torch_private
from cubeloom.base.grid import AXES, Grid, grids
from cubeloom.parallel.config import Batch, ParallelConfig, Rest
from cubeloom.parallel.cut import CutError, lookup, pattern_of
from cubeloom.parallel.layers.declared import Cut, Seen
from cubeloom.parallel.specs import LayerSpec, LinearSpec

# What decides what a layer of torch's computes, and where hooks are kept.
_COMPUTES = ("forward", "__call__", "_conv_forward")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_TRIED = 300  # grids near one that is refused: a large number of ranks has tens of thousands


def resolve(model: nn.Module, cut: Cut, grid: Grid, rest: Rest, batch: Batch) -> list[LayerSpec]:
    """The spec of each layer, in the order of the modules. Raises CutError if one cannot be cut on this grid."""
    found = specs_of(model, cut)
    complaints = list(problems(found, grid, rest, batch))
    if complaints:
        raise CutError(_refusal(complaints, found, grid, rest, batch))
    return found


def specs_of(model: nn.Module, cut: Cut) -> list[LayerSpec]:
    """As `resolve`, without asking whether the sizes divide: the same on every grid."""
    _refuse_unknown(model, cut)
    pixels = pixels_of_layers(model)
    read_by_loss: tuple[str, ...] = getattr(model, "read_by_loss", ())
    owners: dict[int, str] = {}
    found: list[LayerSpec] = []
    for name, module in model.named_modules():
        declared = lookup(cut, name)
        if declared is None:
            _refuse_undeclared(name, module)
            continue
        _refuse_options(name, module)
        _refuse_own_code(name, module)
        weight = getattr(module, "weight", None)
        owner = owners.setdefault(id(weight), name) if weight is not None else name
        spec = declared.spec(name, module, Seen(pixels.get(name), owner if owner != name else None))
        if spec is None:
            raise CutError(
                f"layer {name} is a {type(module).__name__}, which the cut cannot take as {type(declared).__name__}"
            )
        if isinstance(spec, LinearSpec):
            # Its logits may then be computed together with the loss.
            spec = replace(spec, with_loss=name in read_by_loss and not spec.bias and not spec.turn)
        found.append(spec)
    return found


def pixels_of_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Where rows are not tokens: the pixels of a sample that go into and come out of each layer.

    Seen in a run on the meta device of a model that has an `example` of its inputs; others have tokens.
    """
    if not hasattr(model, "example"):
        return {}
    seen: dict[str, tuple[int, int]] = {}

    def watch(name: str, layer: nn.Module) -> RemovableHandle:
        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if inputs[0].dim() > 1:
                seen[name] = _pixels(layer, inputs[0]), _pixels(layer, output)

        return layer.register_forward_hook(note)

    hooks = [watch(name, module) for name, module in model.named_modules() if not list(module.children())]
    with torch.no_grad():
        model(**model.example(2))  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    return seen


def _pixels(layer: nn.Module, tensor: Tensor) -> int:
    """`[samples, pixels, features]` of a linear, `[samples, features, pixels…]` of others."""
    return math.prod(tensor.shape[1:-1] if isinstance(layer, nn.Linear) else tensor.shape[2:])


def _refuse_unknown(model: nn.Module, cut: Cut) -> None:
    names = {name for name, _ in model.named_modules()}
    known = names | {pattern_of(name) for name in names}
    for key in cut:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CutError(f"the cut names {key!r}, but the model has no such layer{hint}")


def _refuse_undeclared(name: str, module: nn.Module) -> None:
    """What would compute something else on a part than on the whole is never left serial in silence."""
    title = f"layer {name} ({type(module).__name__})"
    if next(module.parameters(recurse=False), None) is not None:
        raise CutError(f"{title} has parameters but the cut does not say how it lies")
    if next(module.buffers(recurse=False), None) is not None:
        raise CutError(f"{title} has buffers, which a cut cannot fill; compute them in forward")
    if isinstance(module, nn.Dropout) and module.p > 0:
        raise CutError(f"{title} is not in the cut, so its mask would depend on the grid")
    if isinstance(module, torch_private.AnyLoss):
        raise CutError(f"{title} is not in the cut, so each rank would take the mean of its own rows")


def _refuse_options(name: str, module: nn.Module) -> None:
    """Options of torch's layers that have no form on the cube."""
    plain: dict[str, object] = {}
    if isinstance(module, nn.Embedding):
        plain = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    elif isinstance(module, nn.CrossEntropyLoss):
        plain = {"weight": None, "reduction": "mean"}
    for option, value in plain.items():
        if getattr(module, option) != value:
            title = f"layer {name} ({type(module).__name__})"
            raise CutError(
                f"{title} has {option}={getattr(module, option)!r}, which has no form here; only {value!r} has"
            )


def _refuse_own_code(name: str, module: nn.Module) -> None:
    """What a user added to a layer of torch's would be gone with the layer."""
    title = f"layer {name} ({type(module).__name__})"
    known = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn."))
    own = next(
        (each for each in _COMPUTES if getattr(type(module), each, None) is not getattr(known, each, None)), None
    )
    # Our own GroupNorm in another order has a form.
    if known is not nn.Module and (own or "forward" in vars(module)) and not hasattr(module, "order"):
        raise CutError(
            f"{title} has a {own or 'forward'} of its own, which would be lost: only {known.__name__} as torch has it can be"
            " cut. Compute the rest in a module around it"
        )
    hooked = [each for each in _HOOKS if getattr(module, each)]
    hooked += [kind for kind in _PARAMETER_HOOKS for each in module.parameters(recurse=False) if getattr(each, kind)]
    if hooked:
        raise CutError(
            f"{title} has hooks ({hooked[0].strip('_')}), which would be lost. Register them after the model is cut, where they"
            " see this rank's part"
        )


def problems(specs: list[LayerSpec], grid: Grid, rest: Rest, batch: Batch) -> Iterator[str]:
    """What the sizes do not divide, in words."""
    parts = grid.data * grid.z
    if batch.samples % parts:
        yield f"the batch of {batch.samples} samples cannot be cut over data={grid.data}·z={grid.z}"
        return
    config = ParallelConfig.exact(grid, rest, batch, item=1)
    for spec in specs:
        for rule in spec.rules(config):
            if rule.broken:
                yield f"layer {spec.name}: {rule.words()}"


def nearest(specs: list[LayerSpec], grid: Grid, rest: Rest, batch: Batch, most: int = 3) -> list[Grid]:
    """Those near a grid that work."""
    return list(islice((each for each in near(grid) if not any(problems(specs, each, rest, batch))), most))


def near(grid: Grid) -> list[Grid]:
    """Other grids, those with as many devices first, then by how little their axes differ."""

    def distance(candidate: Grid) -> tuple[float, float]:
        ratios = [math.log2(candidate.size(axis) / grid.size(axis)) for axis in AXES]
        return abs(sum(ratios)), sum(map(abs, ratios))

    size = grid.world // grid.pipe
    sizes = range(max(1, size // 2), size * 2 + 1) if size <= 64 else [size]
    found = (replace(each, pipe=grid.pipe) for size in sizes for each in grids(size, ("data", "z", "y", "x")))
    return sorted(found, key=distance)[:_TRIED]


def _refusal(complaints: list[str], specs: list[LayerSpec], grid: Grid, rest: Rest, batch: Batch) -> str:
    more = f" (and {len(complaints) - 1} more like it)" if len(complaints) > 1 else ""
    working = nearest(specs, grid, rest, batch)
    advice = f"grids that work: {'; '.join(map(str, working))}" if working else "none of the nearest grids works"
    return f"grid {grid}: {complaints[0]}{more}; {advice}"
