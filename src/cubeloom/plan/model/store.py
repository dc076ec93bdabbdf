"""The lists of layers of all presets, kept beside the code: a plan needs no torch, whose import takes longer than planning.

`python -m cubeloom.plan.model` writes them anew; a test holds them to the real modules.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.plan.model import layers as plan

DATA = Path(__file__).parent / "data"
_LAYERS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        plan.Linear, plan.Norm, plan.Embedding, plan.Table, plan.Loss, plan.FirstToken, plan.Whole, plan.Edge, plan.ImageNorm,
        plan.Share, plan.Concat, plan.SquaredLoss, plan.Attention, plan.Pointwise,
    )
}  # fmt: skip


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


@cache
def load(name: str) -> plan.Model:
    """The layers of a preset."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"no model is called {name!r}{hint} There are {', '.join(names())}")
    return read(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")))


def with_stages(model: plan.Model, count: int) -> plan.Model:
    """The same, with the cut into that many stages; asked of the real modules where the list does not have it."""
    if count in model.cuts or count > len(model.row):
        return model
    from cubeloom.plan.model.derive import stages_of

    return replace(model, cuts={**model.cuts, count: stages_of(model.name, count)})


def text(model: plan.Model) -> str:
    """As a file: what has its default is left out."""
    kinds = [
        {
            "layers": [_plain(layer) for layer in kind.layers],
            "handed": [asdict(each) for each in kind.handed],
            "losses": kind.losses,
        }
        for kind in model.kinds
    ]
    whole = {
        "name": model.name,
        "tokens": model.tokens,
        "sequence": model.sequence,
        "kinds": kinds,
        "row": model.row,
        "cuts": {str(count): ends for count, ends in model.cuts.items()},
    }
    return json.dumps(whole, separators=(",", ":")) + "\n"


def _plain(layer: plan.Any) -> dict[str, Any]:
    given = {
        each.name: getattr(layer, each.name) for each in fields(layer) if getattr(layer, each.name) != each.default
    }
    return {"layer": type(layer).__name__, **given}


def read(whole: Mapping[str, Any]) -> plan.Model:
    return plan.Model(
        name=whole["name"],
        tokens=whole["tokens"],
        sequence=whole["sequence"],
        kinds=tuple(
            plan.Piece(
                layers=tuple(map(_layer, kind["layers"])),
                handed=tuple(plan.Handed(**each) for each in kind["handed"]),
                losses=kind["losses"],
            )
            for kind in whole["kinds"]
        ),
        row=tuple(whole["row"]),
        cuts={int(count): tuple(ends) for count, ends in whole["cuts"].items()},
    )


def _layer(given: Mapping[str, Any]) -> Any:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key != "layer"}
    return _LAYERS[given["layer"]](**values)
