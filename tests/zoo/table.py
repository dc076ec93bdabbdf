"""Writes docs/zoo.md: each architecture on each grid, against its serial model.

python -m tests.zoo.table                 # all of it: half an hour on two cores
python -m tests.zoo.table llama gpt2      # some
"""

from __future__ import annotations

import datetime
import platform
import sys
import tempfile
from collections.abc import Sequence
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
HEAD = """# Architectures that were tried

Models of Hugging Face and diffusers as they come, small and with random values, and a user's GPT. Each trains one step on each
grid, in double precision, beside its serial model on one process. A cell has the largest relative difference of a gradient; the
bytes that every rank counted are those that were predicted, or the cell says so. `cut` is the share of the parameters that x and
y cut on `x=2,y=2`, `FLOPs` what a rank computes there: 25 % is all that four ranks can save. [any-model.md](any-model.md) says
how such models lie.
"""


def row(name: str, folder: Path, pool: RankPool) -> list[str]:
    source = named(name_of(name, folder))
    with torch.device("meta"):
        model = source.build()
    traced = source.cut(model).traced(model, Grid(x=2, y=2), Batch(4, 16))  # type: ignore[union-attr]
    return [f"{traced.cut_share:.1%}", f"{traced.flops_share:.1%}", *(cell(name, grid, folder, pool) for grid in GRIDS)]


def cell(name: str, grid: str, folder: Path, pool: RankPool) -> str:
    try:
        report = verify(experiment(name, Grid.parse(grid), folder), pool=pool, timeout=180)
    except UserError as error:
        print(name, grid, error, file=sys.stderr)  # noqa: T201
        return "refused"
    words = f"{report.grad_diff:.0e}"
    if report.wrong or not report.replicas_agree:
        words += " WRONG"
    return words if report.bytes_agree else f"{words}, bytes differ"


def main(names: Sequence[str]) -> None:
    transformers.logging.set_verbosity_error()
    lines = [
        HEAD,
        f"| model | cut | FLOPs | {' | '.join(f'`{grid}`' for grid in GRIDS)} |",
        "|---" * (3 + len(GRIDS)) + "|",
    ]
    with RankPool(8) as pool, tempfile.TemporaryDirectory() as folder:
        for name in names or (*ARCHITECTURES, *FUNCTIONS):
            title = ARCHITECTURES[name].model if name in ARCHITECTURES else name
            found = row(name, Path(folder), pool)
            lines.append(f"| {title}{' (' + name + ')' if ',' in name else ''} | {' | '.join(found)} |")
            print(lines[-1], flush=True)  # noqa: T201
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines += ["", f"`python -m tests.zoo.table`, {datetime.date.today()}, {platform.machine()}, two cores, {versions}."]
    if not names:
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
