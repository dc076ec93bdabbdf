"""From a model, its cut and a grid to the form of every layer; or to a clear refusal, before anything starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from torch import nn

from cubeloom.base import torch_private
from cubeloom.base.grid import AXES, Grid, grids
from cubeloom.parallel import cut as declared
from cubeloom.parallel.check import Example, check, where_called
from cubeloom.parallel.cut import Cut, CutError, Kind, LayerError, Rest, lookup, pattern_of, written
from cubeloom.parallel.forms import (
    Batch,
    DropoutForm,
    EmbeddingForm,
    FirstTokenForm,
    Form,
    LinearForm,
    LossForm,
    NormForm,
    Spread,
    TableForm,
    WholeForm,
)
from cubeloom.parallel.products import Convolution
from cubeloom.parallel.resolve_images import Rows, image_form, rows_of_layers, sizes

# What decides what a layer of torch's computes, and where hooks are kept.
_COMPUTES = ("forward", "__call__", "_conv_forward")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_TRIED = 300  # grids near one that is refused: a large number of ranks has tens of thousands


def resolve(
    model: nn.Module,
    cut: Cut,
    grid: Grid,
    rest: Rest,
    batch: Batch,
    example: Example | None = None,
    unchecked: bool = False,
) -> list[Form]:
    """The form of each layer, in the order of the modules. Raises CutError if one cannot be cut.

    The model is run once without values, on what `example` makes of a number of samples, and refused where it would compute
    something else on parts than on the whole. `unchecked`: the caller answers for that, such as for code that depends on
    values.
    """
    try:
        found = forms(model, cut, grid, rest)
        complaints = list(problems(found, grid, batch))
        if complaints:
            raise CutError(_refusal(complaints, model, cut, grid, rest, batch))
        if not unchecked:
            check(model, cut, found, grid, batch, example)
    except LayerError as error:
        line = where_called(model, error.layer, batch, example)
        raise CutError(f"{error}; {line} calls it" if line else str(error)) from None
    return found


def forms(model: nn.Module, cut: Cut, grid: Grid, rest: Rest) -> list[Form]:
    """As `resolve`, without asking whether the sizes divide."""
    _refuse_unknown(model, cut)
    rows = rows_of_layers(model)
    read_by_loss: tuple[str, ...] = getattr(model, "read_by_loss", ())
    owners: dict[int, str] = {}
    found: list[Form] = []
    for name, module in model.named_modules():
        kind = lookup(cut, name)
        if kind is None:
            _refuse_undeclared(name, module)
            continue
        _refuse_options(name, module)
        _refuse_own_code(name, module)
        weight = getattr(module, "weight", None)
        owner = owners.setdefault(id(weight), name) if weight is not None else name
        shares = owner if owner != name else None
        form = _form(name, module, kind, grid, rest, shares, rows.get(name))
        if name in read_by_loss and isinstance(form, LinearForm):
            form = replace(form, with_loss=_fits_loss(form, grid))
        found.append(form)
    return found


def _fits_loss(form: LinearForm, grid: Grid) -> bool:
    """Whether a head can be computed together with its loss: its logits need no sum, and nothing is gathered in a backward."""
    return (
        not form.bias
        and not form.turn
        and grid.size(form.k_axis) == 1
        and (grid.z == 1 or form.weights == "replicated")
        and (grid.size(form.n_axis) == 1 or form.inputs == Spread.REPLICATED or form.saved == "kept")
    )


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
        raise LayerError(name, f"{title} has parameters but the cut does not say how it lies")
    if next(module.buffers(recurse=False), None) is not None:
        raise LayerError(name, f"{title} has buffers, which a cut cannot fill; compute them in forward")
    if isinstance(module, nn.Dropout) and module.p > 0:
        raise LayerError(name, f"{title} is not in the cut, so its mask would depend on the grid")
    if isinstance(module, torch_private.AnyLoss):
        raise LayerError(name, f"{title} is not in the cut, so each rank would take the mean of its own rows")


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


def _form(
    name: str, module: nn.Module, kind: Kind, grid: Grid, rest: Rest, shares: str | None, pixels: Rows | None
) -> Form:
    stream = Spread.ROWS if rest.activations == "sharded" else Spread.REPLICATED
    match kind, module:
        case ((declared.Expand() | declared.Contract()), nn.Linear() | Convolution()):
            return _linear(name, module, kind, grid, rest, stream, shares, pixels)
        case declared.Norm(side="x"), nn.LayerNorm() | nn.RMSNorm():
            rows = Spread.ROWS if kind.sharded else stream
            bias = getattr(module, "bias", None) is not None
            return NormForm(name, math.prod(module.normalized_shape), isinstance(module, nn.LayerNorm), bias, rows)
        case declared.Embedding(), nn.Embedding():
            return EmbeddingForm(name, module.num_embeddings, module.embedding_dim, stream, rest.weights)
        case declared.Table(), nn.Embedding():
            sharded = module.num_embeddings % (grid.y * grid.z) == 0
            return TableForm(name, module.num_embeddings, module.embedding_dim, stream, sharded)
        case declared.Dropout(), nn.Dropout():
            return DropoutForm(name, module.p, stream)
        case declared.Loss(), nn.Module():
            smoothing, ignored = getattr(module, "label_smoothing", 0.0), getattr(module, "ignore_index", -100)
            return LossForm(name, float(smoothing), int(ignored), kind.whole)
        case declared.FirstToken(), nn.Module():
            return FirstTokenForm(name, kind.features, stream)
        case declared.Whole(), nn.Linear():
            return WholeForm(name, module.in_features, module.out_features, module.bias is not None)
    form = image_form(name, module, kind, stream, pixels)
    if form is not None:
        return form
    raise LayerError(name, f"layer {name} is a {type(module).__name__}, which the cut cannot take as {written(kind)}")


def _linear(
    name: str,
    module: nn.Linear | Convolution,
    kind: declared.Expand | declared.Contract,
    grid: Grid,
    rest: Rest,
    stream: Spread,
    shares: str | None,
    pixels: Rows | None,
) -> LinearForm:
    inputs = outputs = stream
    side: declared.Side = "y"
    if isinstance(kind, declared.Expand):
        side = "x"
        inputs = Spread.ROWS if kind.sharded_input else stream
        outputs = Spread.ROWS if kind.sharded_output else stream
    if kind.turn:
        outputs = Spread.ROWS
    if kind.heads is not None:
        if not isinstance(module, nn.Linear):
            raise CutError(
                f"layer {name} is a convolution, whose features cannot be cut by heads; use a linear on pixels"
            )
        # Whole heads where they suffice for x and y, otherwise whole sequences over x.
        spread = Spread.FEATURES if kind.heads % (grid.x * grid.y) == 0 else Spread.ROWS
        inputs, outputs = (inputs, spread) if side == kind.stream else (spread, outputs)
    k, n, taps = sizes(name, module)
    return LinearForm(
        name,
        k=k,
        n=n,
        side=side,
        inputs=inputs,
        outputs=outputs,
        weights=rest.weights,
        saved=rest.inputs,
        bias=module.bias is not None,
        heads=kind.heads,
        turn=kind.turn,
        shares=shares,
        head_axis="y" if kind.stream == "x" else "x",
        pixels=pixels,
        taps=taps,
        transposed=getattr(module, "transposed", False),
    )


def problems(found: list[Form], grid: Grid, batch: Batch) -> Iterator[str]:
    parts = grid.data * grid.z
    if batch.samples % parts:
        yield f"the batch of {batch.samples} samples cannot be cut over data={grid.data}·z={grid.z}"
    for form in found:
        for problem in form.problems(grid, batch):
            yield f"layer {form.name}: {problem}"


def divides(model: nn.Module, cut: Cut, grid: Grid, rest: Rest, batch: Batch) -> bool:
    """Whether `resolve` would take it. A refusal looks for advice, which takes long where many are asked about."""
    return not any(problems(forms(model, cut, grid, rest), grid, batch))


def nearest(model: nn.Module, cut: Cut, grid: Grid, rest: Rest, batch: Batch, most: int = 3) -> list[Grid]:
    """Those near a grid that work."""
    return list(islice((each for each in near(grid) if divides(model, cut, each, rest, batch)), most))


def near(grid: Grid) -> list[Grid]:
    """Other grids, those with as many devices first, then by how little their axes differ."""

    def distance(candidate: Grid) -> tuple[float, float]:
        ratios = [math.log2(candidate.size(axis) / grid.size(axis)) for axis in AXES]
        return abs(sum(ratios)), sum(map(abs, ratios))

    size = grid.world // grid.pipe
    sizes = range(max(1, size // 2), size * 2 + 1) if size <= 64 else [size]
    found = (replace(each, pipe=grid.pipe) for size in sizes for each in grids(size, ("data", "z", "y", "x")))
    return sorted(found, key=distance)[:_TRIED]


def _refusal(complaints: list[str], model: nn.Module, cut: Cut, grid: Grid, rest: Rest, batch: Batch) -> str:
    more = f" (and {len(complaints) - 1} more like it)" if len(complaints) > 1 else ""
    working = nearest(model, cut, grid, rest, batch)
    advice = f"grids that work: {'; '.join(map(str, working))}" if working else "none of the nearest grids works"
    return f"grid {grid}: {complaints[0]}{more}; {advice}"
