"""The lists of layers of all presets, stored beside the code: a plan need not import torch, which takes longer than
planning.

`python -m cubeloom.plan.model` writes them again; a test compares them with the real modules.
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
from cubeloom.parallel.specs import LayerSpec
from cubeloom.pipeline.volume import StageOutput
from cubeloom.plan.model.model import Model, Piece

DATA = Path(__file__).parent / "data"


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


@cache
def load(name: str) -> Model:
    """The layers of a preset."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"no model is called {name!r}{hint} There are {', '.join(names())}")
    return read(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")))


def with_stages(model: Model, count: int) -> Model:
    """The same, with the cut into this number of stages, which is derived from the real modules if the list lacks it."""
    if count in model.cuts or count > len(model.row):
        return model
    from cubeloom.plan.model.derive import stages_of

    return replace(model, cuts={**model.cuts, count: stages_of(model.name, count)})


def text(model: Model) -> str:
    """As a file, without default values."""
    kinds = [
        {
            "layers": [_plain(layer) for layer in kind.layers],
            "outputs": [asdict(each) for each in kind.outputs],
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


def _plain(layer: LayerSpec) -> dict[str, Any]:
    given = {
        each.name: getattr(layer, each.name) for each in fields(layer) if getattr(layer, each.name) != each.default
    }
    return {"layer": type(layer).__name__.removesuffix("Spec"), **given}


def read(whole: Mapping[str, Any]) -> Model:
    return Model(
        name=whole["name"],
        sequence=whole["sequence"],
        kinds=tuple(
            Piece(
                layers=tuple(map(_layer, kind["layers"])),
                outputs=tuple(StageOutput(**each) for each in kind["outputs"]),
                tokens=whole["tokens"],
                losses=kind["losses"],
                block=number not in (whole["row"][0], whole["row"][-1]),
            )
            for number, kind in enumerate(whole["kinds"])
        ),
        row=tuple(whole["row"]),
        cuts={int(count): tuple(ends) for count, ends in whole["cuts"].items()},
    )


def _layer(given: Mapping[str, Any]) -> LayerSpec:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key != "layer"}
    kind: Any = LayerSpec.kinds[given["layer"]]
    return kind(**values)
