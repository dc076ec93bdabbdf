"""Writes docs/zoo.md: each architecture on each grid, against its serial model.

python -m tests.zoo.table                   # all of it: hours on two cores; what an earlier run found is not run again
python -m tests.zoo.table --grid x=2,y=2    # one grid
python -m tests.zoo.table llama gpt2        # some, printed
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from cubeloom import Grid, UserError
from cubeloom.launch import RankPool
from cubeloom.models.named import named
from cubeloom.parallel import Batch
from cubeloom.tools.verify import verify

from .architectures import ARCHITECTURES, FUNCTIONS, name_of
from .test_zoo import GRIDS, experiment

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
FOUND = Path(tempfile.gettempdir()) / "cubeloom-zoo.json"  # of runs so far, by architecture and grid
HEAD = """# Architectures that were tried

Models of Hugging Face, diffusers, timm and torchvision as they come, small and with random values, and a user's GPT. Each
trains one step on each grid, in double precision, beside its serial model on one process. A cell has the largest relative
difference of a gradient; the bytes that every rank counted are those that were predicted, or the cell says so. `cut` is the
share of the parameters that x and y cut on `x=2,y=2`, `FLOPs` what a rank computes there: 25 % is all that four ranks can
save. [any-model.md](any-model.md) says how such models lie.
"""
_OF_PLANE = "cut and FLOPs"


def plane(name: str, folder: Path) -> str:
    source = named(name_of(name, folder))
    with torch.device("meta"):
        model = source.build()
    traced = source.cut(model).traced(model, Grid(x=2, y=2), Batch(4, 16))  # type: ignore[union-attr]
    return f"{traced.cut_share:.1%} | {traced.flops_share:.1%}"


def cell(name: str, grid: str, folder: Path, pool: RankPool) -> tuple[str, str]:
    """What the table says, and why something is refused."""
    try:
        report = verify(experiment(name, Grid.parse(grid), folder), pool=pool, timeout=600)
    except UserError as error:
        return "refused", str(error)
    words = f"{report.grad_diff:.0e}"
    if report.wrong or not report.replicas_agree:
        words += " WRONG"
    return (words if report.bytes_agree else f"{words}, bytes differ"), ""


def run(names: list[str], grids: list[str], found: dict[str, dict[str, list[str]]]) -> Iterator[None]:
    """Fills in what is missing, a cell at a time."""
    with RankPool(8) as pool, tempfile.TemporaryDirectory() as folder:
        for grid in grids:
            for name in names:
                if grid not in found.setdefault(name, {}):
                    if grid == _OF_PLANE:
                        found[name][grid] = [plane(name, Path(folder)), ""]
                    else:
                        found[name][grid] = list(cell(name, grid, Path(folder), pool))
                    print(name, grid, *found[name][grid], flush=True)  # noqa: T201
                    yield


def page(found: dict[str, dict[str, list[str]]], names: list[str]) -> str:
    grids = (_OF_PLANE, *GRIDS)
    lines = [HEAD, f"| model | cut | FLOPs | {' | '.join(f'`{grid}`' for grid in GRIDS)} |"]
    lines.append("|---" * (3 + len(GRIDS)) + "|")
    reasons: dict[str, list[str]] = {}
    for name in names:
        title = ARCHITECTURES[name].model if name in ARCHITECTURES else name
        title += f" ({name})" if "," in name and name in ARCHITECTURES else ""
        cells = [found[name].get(grid, ["not run", ""]) for grid in grids]
        lines.append(f"| {title} | {' | '.join(words for words, _ in cells)} |")
        for grid, (_, why) in zip(grids, cells, strict=True):
            if why:
                reasons.setdefault(why.rpartition(": ")[2].replace("\n", " "), []).append(f"{title} on `{grid}`")
    if reasons:
        lines += ["", "Refused:", ""]
        lines += [f"- {', '.join(where)}: {why}" for why, where in reasons.items()]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines += ["", f"`python -m tests.zoo.table`, {datetime.date.today()}, {platform.machine()}, two cores, {versions}."]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--grid", action="append")
    given = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    every = [*ARCHITECTURES, *FUNCTIONS]
    found = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() and not given.names else {}
    for _ in run(given.names or every, given.grid or [_OF_PLANE, *GRIDS], found):
        if not given.names:
            FOUND.write_text(json.dumps(found), encoding="utf-8")
    if not given.names:
        PAGE.write_text(page(found, every), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
