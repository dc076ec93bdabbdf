"""Lists of layers as JSON and back: frozen values of a few known classes, and nothing else."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from cubeloom.parallel.specs import Call, LayerSpec, WholeParameter
from cubeloom.pipeline.volume import StageOutput
from cubeloom.plan.model.model import Piece, PlaneOutput

_KIND = "is"


def plain(value: Any) -> Any:
    """What has its default is left out."""
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if not is_dataclass(value):
        return value
    own = {each.name: (getattr(value, each.name), each.default) for each in fields(value)}
    said = {name: plain(given) for name, (given, default) in own.items() if default is MISSING or given != default}
    return {_KIND: type(value).__name__, **said}


def value_of(written: Any) -> Any:
    """Raises KeyError or TypeError where `plain` did not make it."""
    if isinstance(written, list):
        return tuple(map(value_of, written))
    if not isinstance(written, dict):
        return written
    own = {name: value_of(each) for name, each in written.items() if name != _KIND}
    return _known()[written[_KIND]](**own)


def _known() -> dict[str, type]:
    others = (Call, WholeParameter, Piece, PlaneOutput, StageOutput)
    return {kind.__name__: kind for kind in (*LayerSpec.kinds.values(), *others)}
