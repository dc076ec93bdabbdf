"""The list of layers from the real modules, on the meta device: their forms, and what else is seen in a run of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.grid import Grid
from cubeloom.models import AttentionCore, Config, SwiGLU, build, config, cut_of
from cubeloom.models.pieces import Piece as TorchPiece
from cubeloom.parallel import forms as resolved
from cubeloom.parallel import image_forms as images
from cubeloom.parallel.cut import Rest
from cubeloom.parallel.forms import Batch, Spread
from cubeloom.parallel.resolve import forms as forms_of
from cubeloom.pipeline.runtime.handed import handed_on
from cubeloom.pipeline.runtime.partition import belongs, counted_costs, partition
from cubeloom.plan.model import layers as plan

# Numbers of stages that the list has the cut for; `store` makes others when they are asked for.
STAGES = (*range(1, 17), *range(20, 65, 4), 72, 80, 88, 96, 112, 128)
Seen = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # shapes of each module's input and output, two samples


def derive(name: str, settings: Config | None = None) -> plan.Model:
    """The layers of a preset, or of a model of other sizes under a name of its own. Of equal pieces only one is described."""
    preset = settings is None
    settings = settings or config(name)
    with torch.device("meta"):
        model = build(settings)
    tokens = not hasattr(model, "example")
    sequence = int(getattr(settings, "positions", 1))
    seen = _run(model, tokens)
    sharded, replicated = (
        forms_of(model, cut_of(model), Grid(), Rest(activations=rest)) for rest in ("sharded", "replicated")
    )
    pieces: list[TorchPiece] = model.pieces()
    handed = [
        handed_on(model, forms, Batch(1, 1)) for forms in (sharded, replicated)
    ]  # of one token, where there are tokens
    found = []
    for number, piece in enumerate(pieces):
        pairs = [pair for pair in zip(sharded, replicated, strict=True) if belongs(pair[0].name, piece.modules)]
        found.append(
            plan.Piece(
                layers=tuple(_layers(model, piece, pairs, seen)),
                handed=tuple(map(_handed, handed[0][number], handed[1][number])),
                losses=sum(isinstance(form, resolved.LossForm | images.SquaredLossForm) for form, _ in pairs),
            )
        )
    anonymous = [_without_place(piece, torch_piece) for piece, torch_piece in zip(found, pieces, strict=True)]
    kinds = list(dict.fromkeys(anonymous))
    costs = counted_costs([piece.modules for piece in pieces], sharded)
    return plan.Model(
        name=name,
        tokens=tokens,
        sequence=sequence,
        kinds=tuple(kinds),
        row=tuple(map(kinds.index, anonymous)),
        # `store` could not make others for a model that has no preset.
        cuts={n: _ends(partition(costs, n)) for n in range(1, len(pieces) + 1) if n in STAGES or not preset},
    )


def stages_of(name: str, count: int) -> tuple[int, ...]:
    """Where each of so many stages of a preset ends."""
    with torch.device("meta"):
        model = build(name)
    forms = forms_of(model, cut_of(model), Grid(), Rest())
    return _ends(partition(counted_costs([piece.modules for piece in model.pieces()], forms), count))


def _ends(ranges: Sequence[range]) -> tuple[int, ...]:
    return tuple(each.stop for each in ranges)


def _run(model: nn.Module, tokens: bool) -> Seen:
    """Shapes that every module without children takes and gives, for two samples, or for two sequences of four tokens."""
    seen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def watch(name: str) -> Any:
        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = tuple(inputs[0].shape), tuple(output.shape)

        return note

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    meta = torch.zeros(2, 4, dtype=torch.long, device="meta")
    with torch.no_grad():
        if not tokens:
            model(**model.example(2))  # type: ignore[operator]
        elif getattr(model.config, "next_sentence", False):
            model(meta, meta, next_sentence=meta[:, 0])
        else:
            model(meta, meta)
    for hook in hooks:
        hook.remove()
    return seen


def _layers(
    model: nn.Module, piece: TorchPiece, pairs: Sequence[tuple[resolved.Form, resolved.Form]], seen: Seen
) -> Iterator[plan.Any]:
    """In the order of the modules, those without a form between those with one."""
    by_name = {pair[0].name: pair for pair in pairs}
    side: plan.Side = "x"  # of the features that the layer before left
    always = whole = False
    for name, module in model.named_modules():
        if not belongs(name, piece.modules):
            continue
        if name in by_name:
            layer = _layer(*by_name[name], module, seen)
            if layer is None:
                continue
            if isinstance(layer, plan.Linear):
                side, always, whole = layer.bias_axis, layer.always_out and layer.heads is None, False
            elif isinstance(layer, plan.Edge | plan.ImageNorm):
                side, always, whole = layer.side, False, False
            elif isinstance(layer, plan.Norm):
                side, always, whole = "x", layer.always, False
            elif isinstance(layer, plan.Whole):
                whole = True
            yield layer
        elif isinstance(module, AttentionCore):
            yield _attention(name, module, by_name, seen)
        elif isinstance(module, nn.GELU | nn.SiLU | SwiGLU):
            yield _pointwise(name, module, seen, side, always, whole)


def _layer(form: resolved.Form, replicated: resolved.Form, module: nn.Module, seen: Seen) -> plan.Any | None:
    name = form.name
    match form, replicated:
        case resolved.LinearForm(), resolved.LinearForm():
            return plan.Linear(
                name=name, k=form.k, n=form.n, side=form.side, bias=form.bias, taps=form.taps, pixels=form.pixels,
                transposed=form.transposed, turn=form.turn, shares=form.shares, heads=form.heads,
                head_axis=form.head_axis, always_in=replicated.inputs != Spread.REPLICATED,
                always_out=replicated.outputs != Spread.REPLICATED, with_loss=form.with_loss,
            )  # fmt: skip
        case resolved.NormForm(), resolved.NormForm():
            always = replicated.rows == Spread.ROWS
            return plan.Norm(name=name, features=form.features, centred=form.centred, bias=form.bias, always=always)
        case resolved.EmbeddingForm(), _:
            return plan.Embedding(name=name, entries=form.entries, features=form.features)
        case resolved.TableForm(), _:
            return plan.Table(name=name, entries=form.entries, features=form.features)
        case resolved.LossForm(), _:
            return plan.Loss(name=name, classes=seen[name][0][-1], smoothing=form.smoothing > 0, whole=form.whole)
        case resolved.FirstTokenForm(), _:
            return plan.FirstToken(name=name, features=form.features)
        case resolved.WholeForm(), _:
            return plan.Whole(name=name, k=form.k, n=form.n, bias=form.bias)
    return _image_layer(form, module, seen)


_EDGES = {
    images.SliceForm: "slice",
    images.JoinForm: "join",
    images.StayForm: "stay",
    images.GroupedForm: "grouped",
}


def _image_layer(form: resolved.Form, module: nn.Module, seen: Seen) -> plan.Any | None:
    name = form.name
    match form:
        case images.WeightedForm():
            into, out = (prod(_pixels(module, shape)) for shape in seen[name])
            return plan.Edge(
                name=name, kind=_EDGES[type(form)], side=form.side, k=form.k, n=form.n, taps=form.taps,  # type: ignore[arg-type]
                bias=form.bias, pixels=(into, out), groups=getattr(form, "groups", 1),
            )  # fmt: skip
        case images.ImageNormForm():
            return plan.ImageNorm(
                name=name, side=form.side, features=form.features, affine=form.affine, pixels=prod(seen[name][0][2:]),
                groups=getattr(form, "groups", None), interleaved=getattr(form, "interleaved", False),
            )  # fmt: skip
        case images.ShareForm():
            return plan.Share(name=name, features=form.features)
        case images.ConcatForm():
            return plan.Concat(name=name, side=form.side, parts=form.parts)
        case images.SquaredLossForm():
            return plan.SquaredLoss(name=name, side=form.side)
    return None  # a dropout


def _pixels(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:-1] if isinstance(module, nn.Linear) else shape[2:]


def _attention(
    name: str, core: AttentionCore, by_name: Mapping[str, tuple[resolved.Form, resolved.Form]], seen: Seen
) -> plan.Attention:
    projection, _ = by_name[f"{name.rpartition('.')[0]}.qkv"]
    assert isinstance(projection, resolved.LinearForm)
    group = (core.queries_per_key + 2) * core.head_dim
    kv_heads = seen[name][0][-1] // group
    return plan.Attention(
        name=name,
        heads=kv_heads * core.queries_per_key,
        kv_heads=kv_heads,
        head_dim=core.head_dim,
        head_axis=projection.head_axis,
        rotary=core.rotary_base is not None,
        causal=core.causal,
        length=None if projection.pixels is None else projection.pixels[1],
    )


def _pointwise(name: str, module: nn.Module, seen: Seen, side: plan.Side, always: bool, whole: bool) -> plan.Pointwise:
    into, out = seen[name]
    image = len(into) == 4
    inputs, outputs = (into[1], out[1]) if image else (into[-1], out[-1])
    # A gated unit keeps what came in and the activated gate; others what came in.
    kept = inputs + outputs if isinstance(module, SwiGLU) else inputs
    pixels = prod(into[2:]) if image else None
    return plan.Pointwise(
        name=name, side=side, inputs=inputs, outputs=outputs, kept=kept, pixels=pixels, always=always, whole=whole
    )


def _handed(sharded: Any, replicated: Any) -> plan.Handed:
    return plan.Handed(numbers=sharded.per_sample, side=sharded.side, always=replicated.rows != Spread.REPLICATED)


def _without_place(piece: plan.Piece, of: TorchPiece) -> plan.Piece:
    """The piece with names that do not say where it stands, unless it stands alone: so that equal ones are equal."""
    (first, *rest) = of.modules
    if rest:
        return piece
    return replace(
        piece, layers=tuple(replace(layer, name=layer.name.removeprefix(f"{first}.")) for layer in piece.layers)
    )
