"""`cubeloom models`: the presets, with their sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from cubeloom.models import PRESETS, build


@dataclass(frozen=True)
class Models:
    """List the models that can be named, with their sizes."""

    def __call__(self) -> int:
        table = Table()
        table.add_column("name", no_wrap=True)
        for title in ("parameters", "layers", "hidden", "heads", "vocabulary", "sequence"):
            table.add_column(title, justify="right", no_wrap=True)
        for name, config in PRESETS.items():
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in build(config).parameters())
            sizes = asdict(config)
            shown = (sizes.get(key, "") for key in ("layers", "hidden", "heads", "vocab", "positions"))
            table.add_row(name, f"{count:,}", *map(str, shown))
        Console().print(table)
        return 0
