"""From a model, its cut and a grid to the spec of every layer; or to a clear error, before anything starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cubeloom.base import torch_private
from cubeloom.base.grid import AXES, Grid, grids
from cubeloom.parallel.check import Example, check, where_called
from cubeloom.parallel.check.results import output_of
from cubeloom.parallel.config import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.cut import CutError, LayerError, lookup, pattern_of
from cubeloom.parallel.layers.declared import AnyCut, Declared, FoundCut, Seen, written
from cubeloom.parallel.outputs import Outputs
from cubeloom.parallel.specs import AttentionSpec, LayerSpec, LinearSpec, LossSpec, fp8_layers

# The attributes that decide what a torch layer computes, and those that hold hooks.
_COMPUTES = ("forward", "__call__", "_conv_forward")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_TRIED = 300  # grids near a refused one: for a large number of ranks there are tens of thousands


def resolve(
    model: nn.Module,
    cut: AnyCut,
    grid: Grid,
    rest: ShardingPolicy,
    batch: Batch,
    example: Example | None = None,
    unchecked: bool = False,
    portions: int = 1,
) -> list[LayerSpec]:
    """The spec of each layer, in the order of the modules. Raises CutError if the model cannot be cut on this grid.

    `batch` is one of `portions` equal parts of a step's batch; an error names batches of a whole step that work. The
    model is run once without values, on what `example` returns for a number of samples, and refused if it would compute
    something else on shards than on the whole. `unchecked`: skip this check, for example for code that depends on
    values; the caller is then responsible.
    """
    return looked_at(model, cut, grid, rest, batch, example, unchecked, portions)[0]


def looked_at(
    model: nn.Module,
    cut: AnyCut,
    grid: Grid,
    rest: ShardingPolicy,
    batch: Batch,
    example: Example | None = None,
    unchecked: bool = False,
    portions: int = 1,
) -> tuple[list[LayerSpec], Outputs | None]:
    """As `resolve`, and how what the model gives lies; None, where it is not checked."""
    if isinstance(cut, FoundCut):
        refuse_fp8_of_found(rest)
        return cut.specs(model, grid, batch), cut.outputs(model, grid, batch)
    try:
        found = specs_of(model, cut)
        if any(problems(found, grid, rest, batch)):
            raise CutError(_refusal(found, grid, rest, batch, portions))
        _refuse_untold_attention(found, grid)
        if rest.precision == "fp8":
            _refuse_fp8(found)
        if unchecked:
            return found, None
        config = ParallelConfig.exact(grid, rest, batch, item=1)
        given = check(model, cut, found, config, batch, example)
    except LayerError as error:
        line = where_called(model, error.layer, batch, example)
        raise CutError(f"{error}; {line} calls it" if line else str(error)) from None
    padded = {int(spec.held(config)): int(spec.n) for spec in found if isinstance(spec, LinearSpec) and spec.padded}
    return found, {path: output_of(each, padded) for path, each in given.items()}


def refuse_fp8_of_found(rest: ShardingPolicy) -> None:
    if rest.precision == "fp8":
        raise CutError(
            'precision = "fp8" is for models with a written cut, and this one is found by tracing: use "model"'
        )


def _refuse_fp8(specs: list[LayerSpec]) -> None:
    rounded = set(fp8_layers(specs))
    if not rounded:
        raise CutError('precision = "fp8": the model has no linear on tokens before its output layer; use "model"')
    for spec in specs:
        if (owner := getattr(spec, "shares", None)) in rounded:
            raise LayerError(
                spec.name,
                f'precision = "fp8": layer {spec.name} shares the weight of {owner}, which would be rounded for one of them;'
                ' use "model"',
            )


def specs_of(model: nn.Module, cut: Mapping[str, Declared]) -> list[LayerSpec]:
    """As `resolve`, without checking that sizes divide: the same on every grid."""
    _refuse_unknown(model, cut)
    pixels = pixels_of_layers(model)
    owners: dict[int, str] = {}
    found: list[LayerSpec] = []
    for name, module in model.named_modules():
        declared = lookup(cut, name)
        if declared is None:
            _refuse_undeclared(name, module)
            continue
        _refuse_options(name, module)
        weight = getattr(module, "weight", None)
        owner = owners.setdefault(id(weight), name) if weight is not None else name
        spec = declared.spec(name, module, Seen(pixels.get(name), owner if owner != name else None))
        if spec is None:
            raise LayerError(
                name, f"layer {name} is a {type(module).__name__}, which the cut cannot take as {written(declared)}"
            )
        _refuse_own_code(spec, module)
        found.append(spec)
    _refuse_shared_sections(found)
    return _with_heads(found)


def _refuse_shared_sections(specs: list[LayerSpec]) -> None:
    """If a weight's outputs are sections for one layer, they would be for a layer that shares it, too."""
    known = {spec.name: spec for spec in specs}
    for spec in specs:
        owner = known.get(getattr(spec, "shares", None) or "")
        if owner is not None and getattr(owner, "sections", ()) != getattr(spec, "sections", ()):
            raise LayerError(
                spec.name,
                f"layer {spec.name} uses the weight of {owner.name}, and the cut gives only one of them, or other, sections:"
                " give both the same",
            )


def _with_heads(specs: list[LayerSpec]) -> list[LayerSpec]:
    """Losses get the number of classes. The heads that they name, if they lead to y, can be padded."""
    linears = {spec.name: spec for spec in specs if isinstance(spec, LinearSpec)}
    found = list(specs)
    for place, loss in enumerate(specs):
        if not isinstance(loss, LossSpec) or loss.head is None:
            continue
        if loss.head not in linears:
            raise CutError(
                f"layer {loss.name}: its head is to be {loss.head!r}, which the cut does not have as an Expand; those that it "
                f"has: {', '.join(name for name, each in linears.items() if each.n_axis == 'y')}"
            )
        head = linears[loss.head]
        if head.sections:
            raise CutError(f"layer {head.name} is the head of {loss.name}: its outputs are classes, without sections")
        found[place] = replace(loss, classes=head.n)
        if head.n_axis == "y" and not head.turn and not loss.whole:
            # The head can be fused with the loss.
            found[specs.index(head)] = replace(head, padded=True, with_loss=not head.bias)
        else:
            found[place] = replace(loss, classes=head.n, head=None)
    return found


def _refuse_untold_attention(specs: list[LayerSpec], grid: Grid) -> None:
    """If a key has fewer queries on a rank than in the serial model, the attention module must be told."""
    config = ParallelConfig.exact(grid, ShardingPolicy(), Batch(1, 1), item=1)
    attentions = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    told = {here for spec in attentions if (here := spec.queries_here(config)) != spec.queries}
    for spec in specs:
        if not isinstance(spec, LinearSpec) or spec.queries is None or (copies := int(spec.copies(config))) == 1:
            continue
        if spec.queries // copies not in told:
            axis, heads, queries = spec.head_axis, spec.heads, spec.queries
            raise CutError(
                f"layer {spec.name}: on {axis}={grid.size(axis)} a key has {queries // copies} of its {queries} queries, and"
                f" the cut names no Attention(heads={heads}, queries={queries}) that knows it"
            )


def pixels_of_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """For models whose rows are not tokens: the pixels per sample of each layer's input and output.

    They are seen in a run on the meta device, if the model has an `example` of its inputs. Other models have tokens.
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


def _refuse_unknown(model: nn.Module, cut: Mapping[str, Declared]) -> None:
    names = {name for name, _ in model.named_modules()}
    known = names | {pattern_of(name) for name in names}
    for key in cut:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CutError(f"the cut names {key!r}, but the model has no such layer{hint}")


def _refuse_undeclared(name: str, module: nn.Module) -> None:
    """Refuse layers that would compute something else on a shard than on the whole and that the cut does not name."""
    title = f"layer {name} ({type(module).__name__})"
    if next(module.parameters(recurse=False), None) is not None:
        raise LayerError(name, f"{title} has parameters but the cut does not say how it lies")
    if next(module.buffers(recurse=False), None) is not None:
        raise LayerError(name, f"{title} has buffers, which a cut cannot fill; compute them in forward")
    if isinstance(module, nn.Dropout) and module.p > 0:
        raise LayerError(name, f"{title} is not in the cut, so its mask would depend on the grid")
    if isinstance(module, torch_private.AnyLoss):
        raise LayerError(name, f"{title} is not in the cut, so each rank would take the mean of its own rows")


def _refuse_options(name: str, module: nn.Module) -> None:
    """Refuse options of torch's layers that are not supported on the cube."""
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


def _refuse_own_code(spec: LayerSpec, module: nn.Module) -> None:
    """Refuse code that a user added to a torch layer: it would be lost with the layer."""
    title = f"layer {spec.name} ({type(module).__name__})"
    known = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn."))
    own = next(
        (each for each in _COMPUTES if getattr(type(module), each, None) is not getattr(known, each, None)), None
    )
    tried = getattr(spec, "joined", None) is not None  # `check.probes` compares it on a few numbers
    if known is not nn.Module and (own or "forward" in vars(module)) and not tried:
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


def problems(specs: list[LayerSpec], grid: Grid, rest: ShardingPolicy, batch: Batch) -> Iterator[str]:
    """Messages about sizes that do not divide."""
    parts = grid.data * grid.z
    if batch.samples % parts:
        yield f"the batch of {batch.samples} samples cannot be cut over data={grid.data}·z={grid.z}"
        return
    config = ParallelConfig.exact(grid, rest, batch, item=1)
    for spec in specs:
        for rule in spec.rules(config):
            if rule.broken:
                yield f"layer {spec.name}: {rule.words()}"


def nearest(specs: list[LayerSpec], grid: Grid, rest: ShardingPolicy, batch: Batch, most: int = 3) -> list[Grid]:
    """Grids near this one that work."""
    return list(islice((each for each in near(grid) if not any(problems(specs, each, rest, batch))), most))


def near(grid: Grid) -> list[Grid]:
    """Other grids: first those with as many devices, then by how little their axes differ."""

    def distance(candidate: Grid) -> tuple[float, float]:
        ratios = [math.log2(candidate.size(axis) / grid.size(axis)) for axis in AXES]
        return abs(sum(ratios)), sum(map(abs, ratios))

    size = grid.world // grid.pipe
    sizes = range(max(1, size // 2), size * 2 + 1) if size <= 64 else [size]
    found = (replace(each, pipe=grid.pipe) for size in sizes for each in grids(size, ("data", "z", "y", "x")))
    return sorted(found, key=distance)[:_TRIED]


def _refusal(found: list[LayerSpec], grid: Grid, rest: ShardingPolicy, batch: Batch, portions: int) -> str:
    complaints, advice = list(problems(found, grid, rest, batch)), []
    of_sizes = list(problems(found, grid, rest, replace(batch, samples=grid.data * grid.z * grid.x * grid.y)))
    if of_sizes:
        complaints = of_sizes  # another batch would not help
    else:
        working = [f"{samples * portions}" for samples in _nearest_batches(found, grid, rest, batch)]
        noun = "batches that work" if len(working) > 1 else "batch that works"
        advice.append(f"the nearest {noun}: {' or '.join(working)} samples")
    grids = nearest(found, grid, rest, batch)
    advice.append(f"grids that work: {'; '.join(map(str, grids))}" if grids else "none of the nearest grids works")
    more = f" (and {len(complaints) - 1} more like it)" if len(complaints) > 1 else ""
    return f"grid {grid}: {complaints[0]}{more}; {'; '.join(advice)}"


def _nearest_batches(found: list[LayerSpec], grid: Grid, rest: ShardingPolicy, batch: Batch) -> list[int]:
    """The nearest smaller and larger batches that work, if there are any. Rows always divide in a multiple of all axes."""
    unlike = list({replace(spec, name=""): spec for spec in found}.values())  # layers of equal sizes are checked once
    parts, sure = grid.data * grid.z, grid.data * grid.z * grid.x * grid.y
    first, last = batch.samples // parts, batch.samples // sure * grid.x * grid.y + grid.x * grid.y
    ways_down_and_up = (range(first, max(first - _TRIED, 0), -1), range(first + 1, min(last, first + _TRIED)))

    def works(times: int) -> bool:
        return times * parts != batch.samples and not any(
            problems(unlike, grid, rest, replace(batch, samples=times * parts))
        )

    below, above = (next((each for each in ways if works(each)), None) for ways in ways_down_and_up)
    return [each * parts for each in (below, above or last) if each is not None]
