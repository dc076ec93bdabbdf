"""From the search's result to the spec of every layer: cut layers, and modules whose parameters stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from torch import nn

from cubeloom.base import torch_private
from cubeloom.parallel.cut import pattern_of
from cubeloom.parallel.specs import (
    Call,
    LayerSpec,
    Side,
    TracedChannelNormSpec,
    TracedEmbeddingSpec,
    TracedLinearSpec,
    TracedLossSpec,
    TracedNormSpec,
    WholeParameter,
    WholeSpec,
)
from cubeloom.parallel.traced.known import ChannelNorm, Linear, Norm, Table
from cubeloom.parallel.traced.placing import Placed, Use
from cubeloom.parallel.traced.search import Found

_DOUBLE = 8  # bytes, also of the sums of a loss of whole logits


def specs_of(model: nn.Module, found: Found, tied: dict[str, str], samples: int) -> list[LayerSpec]:
    """For an example with this many samples."""
    cut = {name: each for name, each in found.placed.items() if not each.left_whole}
    item = next((parameter.element_size() for parameter in model.parameters()), 4)
    return [
        *_layers(model, cut, tied, samples),
        *_losses(found, samples, item),
        *_whole(model, found, set(cut), samples),
    ]


def _of_one_sample(use: Use, samples: int) -> Call:
    if use.fixed:
        return replace(use.call, fixed=True)
    rows_in, rows_out = (Fraction(rows, samples) for rows in (use.call.rows_in, use.call.rows_out))
    return replace(use.call, rows_in=rows_in, rows_out=rows_out)


def _layers(model: nn.Module, cut: dict[str, Placed], tied: dict[str, str], samples: int) -> Iterator[LayerSpec]:
    gatherers: dict[tuple[object, ...], str] = {}  # the layer that gathers the input of each call
    for name, placed in cut.items():
        calls = tuple(_of_one_sample(use, samples) for use in placed.uses)
        own = model.get_submodule(name).named_parameters(recurse=False)
        live = any(use.call.live for use in placed.uses)
        trained = tuple(kind for kind, each in own if each.requires_grad and live)
        match placed.known:
            case Linear() as known:
                key = (placed.side, placed.taken, *(use.source for use in placed.uses))
                first = gatherers.setdefault(key, name)
                yield TracedLinearSpec(
                    name=name,
                    k=known.k,
                    n=known.n,
                    side=placed.side,
                    bias=known.bias,
                    kernel_numel=known.kernel_numel,
                    transposed=known.transposed,
                    shares=tied.get(name),
                    padded=placed.given in ("lazy", "whole") and known.dim == -1 and not known.transposed,
                    calls=calls,
                    trained=trained,
                    taken=placed.taken,
                    given=placed.given,
                    sections=placed.sections,
                    joins=None if first == name else first,
                    kept=placed.kept,
                    shared=placed.shared,
                    rank=known.rank,
                )
            case Table() as table:
                yield TracedEmbeddingSpec(
                    name=name,
                    entries=table.entries,
                    features=table.features,
                    calls=calls,
                    trained=trained,
                    given=placed.given,
                    scale=table.scale,
                    padding=table.padding,
                    shares=tied.get(name),
                )
            case Norm() | ChannelNorm():
                yield _norm(name, placed, calls, trained)


def _norm(name: str, placed: Placed, calls: tuple[Call, ...], trained: tuple[str, ...]) -> LayerSpec:
    norm = placed.known
    both: tuple[Side, ...] = ("y", "x") if placed.side == "y" else ("x", "y")
    axes = both[: ("whole", "one", "both").index(placed.given)]
    if isinstance(norm, ChannelNorm):
        return TracedChannelNormSpec(
            name=name,
            axes=axes,
            features=norm.features,
            weight=norm.weight,
            bias=norm.bias,
            calls=calls,
            groups=norm.groups,
            of_batch=norm.of_batch,
            remembers=norm.remembers,
            differing=placed.differing,
            trained=trained,
        )
    assert isinstance(norm, Norm)
    return TracedNormSpec(
        name=name,
        axes=axes,
        features=norm.features,
        centred=norm.centred,
        weight=norm.weight,
        bias=norm.bias,
        eps=norm.eps,
        offset=norm.offset,
        differing=placed.differing,
        calls=calls,
        trained=trained,
    )


def _losses(found: Found, samples: int, item: int) -> Iterator[LayerSpec]:
    last = next(reversed(found.placed), "")
    for number, loss in enumerate(found.losses):
        head = None if loss.head is None else found.placed[loss.head]
        axis: Side | None = None if head is None else "y" if head.side == "x" else "x"
        nbytes: int | None = _DOUBLE
        if loss.head is not None:
            nbytes = loss.nbytes if item == _DOUBLE else None  # a float64 model may compute its loss in float32
        yield TracedLossSpec(
            name=f"{loss.head or last}.loss{number}",
            axis=axis,
            rows=Fraction(loss.rows, samples),
            nbytes=nbytes,
            smoothing=loss.smoothing,
        )


def _whole(model: nn.Module, found: Found, cut: set[str], samples: int) -> Iterator[LayerSpec]:
    """The other modules with their own parameters. A shared parameter belongs to the first module."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = {id(each) for name in cut for each in model.get_submodule(name).parameters()}
    for name, module in model.named_modules():
        parameters = torch_private.parameters_of(module)
        own = {kind: each for kind, each in parameters.items() if each is not None and id(each) not in taken}
        if name in cut or not own:
            continue
        taken |= set(map(id, own.values()))
        placed = found.placed.get(name)
        yield WholeSpec(
            name=name,
            kind=type(module).__name__,
            why=_why(name, module, found),
            own=tuple(_parameter(kind, each, names[id(each)], found, placed) for kind, each in own.items()),
            forward_flops=_flops(placed, samples),
        )


def _parameter(kind: str, parameter: nn.Parameter, name: str, found: Found, placed: Placed | None) -> WholeParameter:
    differing = found.partial.get(name, frozenset()) if placed is None else placed.differing
    cut = found.choices.parameters.get(pattern_of(name))
    return WholeParameter(
        kind,
        tuple(parameter.shape),
        tuple(sorted(differing)),
        parameter.requires_grad and name in found.live,
        dim=0 if cut is None else cut.place,
        cutting=() if cut is None else tuple(axis for axis, _ in cut.cutting),
        times=found.calls.get(name.rpartition(".")[0], 0) + found.reads.get(name, 0),
    )


def _flops(placed: Placed | None, samples: int) -> float:
    if placed is None or not isinstance(placed.known, Linear):
        return 0.0
    known = placed.known
    return 2.0 * known.k * known.n * known.kernel_numel * sum(use.call.rows_out for use in placed.uses) / samples


def _why(name: str, module: nn.Module, found: Found) -> str:
    placed = found.placed.get(name)
    used = found.calls.get(name) or any(each.rpartition(".")[0] == name for each in found.reads)
    if placed is None and name and not used:
        return "the model does not call it"
    if placed is None:
        return (
            f"{type(module).__name__} is no linear, convolution, table or norm" if name else "they are the model's own"
        )
    if isinstance(placed.known, Norm):
        return "it normalises features that are whole"
    return found.choices.why(name) or "the grid does not divide its features"


def tied_layers(model: nn.Module) -> dict[str, str]:
    """Layers that share the weight of an earlier layer."""
    owners: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        weight = torch_private.parameters_of(module).get("weight")
        if weight is not None and owners.setdefault(id(weight), name) != name:
            found[name] = owners[id(weight)]
    return found
