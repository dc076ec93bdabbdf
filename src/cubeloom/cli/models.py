"""`cubeloom models`: the presets, with their sizes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from cubeloom.base.units import count
from cubeloom.models.presets import PRESETS
from cubeloom.models.sizes import parameters

_SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "vocab": "vocabulary", "positions": "sequence"}


@dataclass(frozen=True, kw_only=True)
class Models:
    """List the presets, with their sizes."""

    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object instead of the table."""

    def __call__(self) -> int:
        if self.json:
            print(
                json.dumps({name: {"parameters": parameters(each), **asdict(each)} for name, each in PRESETS.items()})
            )
            return 0
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("name", no_wrap=True)
        for title in ("parameters", *_SIZES.values()):
            table.add_column(title, justify="right", no_wrap=True)
        for name, config in PRESETS.items():
            sizes = asdict(config)
            table.add_row(name, count(parameters(config)), *(str(sizes.get(key, "")) for key in _SIZES))
        Console().print(table)
        return 0
