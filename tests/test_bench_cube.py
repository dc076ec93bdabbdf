"""The figures of `bench/cube.py`: those of the literature, and that it runs and would say so if bytes did not agree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cubeloom.base.grid import Grid
from cubeloom.comm import Ledger
from cubeloom.tools.baselines import Scheme, Shape, nearest_planes, schemes
from cubeloom.tools.baselines.block import Passes
from cubeloom.tools.baselines.schemes import KEPT, SEQUENCE, summa_moved
from scripts import run_script

BENCH = Path(__file__).parents[1] / "bench" / "cube.py"


def shape_of(tokens: int, hidden: int) -> Shape:
    return Shape(tokens // 1024, 1024, hidden, hidden // 64)


def million_words(shape: Shape, ranks: int) -> dict[str, float]:
    """The linears alone, as `reference/cube.md` 1.9 counts."""
    return {scheme.name: float(scheme.moved(shape, item=1).linears) / 1e6 for scheme in schemes(shape, ranks)}


@pytest.mark.parametrize(
    ("tokens", "hidden", "ranks", "one", "two", "three", "zero", "axonn", "axonn_grid"),
    [
        (12288, 3072, 8, 264, None, 179, 297, 156, Grid(x=1, y=4, z=2)),
        (12288, 3072, 64, 297, 124, 67, 334, 63, Grid(x=2, y=8, z=4)),
        (32768, 8192, 64, 2114, 881, 478, 2378, 449, Grid(x=2, y=8, z=4)),
        (8192, 8192, 8, 470, None, 470, 2114, 403, Grid(x=2, y=4, z=1)),
        (4096, 12288, 8, 352, None, 654, 4756, 302, Grid(x=2, y=4, z=1)),
        (4096, 12288, 64, 396, 710, 245, 5351, 151, Grid(x=4, y=16, z=1)),
    ],
)
def test_the_table_of_one_block(
    tokens: int,
    hidden: int,
    ranks: int,
    one: int,
    two: int | None,
    three: int,
    zero: int,
    axonn: int,
    axonn_grid: Grid,
) -> None:
    """`reference/cube.md` 1.9, every figure of its last table."""
    shape = shape_of(tokens, hidden)
    found = million_words(shape, ranks)
    assert round(found["1-D Megatron"]) == one
    assert round(found["3-D cube, weights kept"]) == three
    assert round(found["FSDP"]) == zero
    assert round(found["4-D AxoNN, its best grid"]) == axonn
    grids = {scheme.name: scheme.grid for scheme in schemes(shape, ranks)}
    assert grids["4-D AxoNN, its best grid"] == axonn_grid
    if two is not None:
        (q,) = nearest_planes(ranks, hidden)
        assert round(float(summa_moved(shape, q, item=1).total) / 1e6) == two


@pytest.mark.parametrize(("ranks", "ratio"), [(8, 24 / 24), (27, 48 / 144), (64, 72 / 408), (512, 168 / 3864)])
def test_from_how_many_tokens_the_cube_moves_less_than_one_dimension(ranks: int, ratio: float) -> None:
    """The same section: above 1.0, 0.33, 0.18 and 0.043 tokens for each hidden feature."""
    hidden = 2**9 * 27 * 32
    for tokens, cube_wins in ((1.02 * ratio * hidden, True), (0.98 * ratio * hidden, False)):
        shape = Shape(round(tokens) // ranks * ranks, 1, hidden, 1)
        found = million_words(shape, ranks)
        assert (found["3-D cube, weights kept"] < found["1-D Megatron"]) == cube_wins


def test_sequence_parallelism_gathers_the_inputs_of_two_linears_once_more() -> None:
    shape = shape_of(12288, 3072)
    again, kept = (Scheme("", Grid(y=8), rest).moved(shape, item=1) for rest in (SEQUENCE, KEPT))
    assert (again.linears - kept.linears) * 8 == 2 * 7 * 12288 * 3072


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_no_grid_beats_the_best(ranks: int) -> None:
    found = million_words(shape_of(32768, 8192), ranks)
    assert min(found.values()) == found["best grid, weights kept"]


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_cube", BENCH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["bench_cube"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_count_that_is_not_the_closed_form_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = bench()
    silent = Passes(Ledger(), Ledger())
    judged = [module.judge_scheme(scheme, [silent] * 8) for scheme in schemes(module.SMALL, 8)]
    assert not any(each.agree for each in judged)
    monkeypatch.setattr(module, "count", lambda planes: judged[:1])
    monkeypatch.setattr(sys, "argv", ["cube.py", "--quick"])
    assert module.main() == 1
    assert "COUNTED AND CLOSED FORM DIFFER: 1-D Megatron" in capsys.readouterr().out


@pytest.mark.long
def test_it_runs_on_real_processes_and_all_bytes_agree() -> None:
    """A few seconds on two cores that have nothing else to do."""
    done = run_script(BENCH, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "counted bytes are the closed form's exactly" in done.stdout
    assert "NO" not in done.stdout.split()
