"""Architectures that others wrote: each trains on each grid as its serial model does, and moves what is predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cubeloom import Grid, UserError
from cubeloom.models.named import named
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment, Report

from .architectures import ARCHITECTURES, FUNCTIONS, SHORT, name_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of transformers' own
GRIDS = ("x=2", "y=2", "z=2", "x=2,y=2,z=2", "pipe=2,y=2")
_SHORT_GRIDS = ("x=2,y=2", "z=2")


def experiment(architecture: str, grid: Grid, folder: Path) -> Experiment:
    samples = 2 * grid.data * grid.z * (2 if grid.pipe > 1 else 1)
    return Experiment(
        model=named(name_of(architecture, folder)),
        grid=grid,
        batch=Batch(samples, 16),
        rest=ShardingPolicy(activations="replicated"),
        steps=1,
        schedule=generate("1f1b", grid.pipe, 2) if grid.pipe > 1 else None,
    )


# Bytes are predicted as more than they are: code outside of a layer reads its weights several times at once.
BYTES_DIFFER = {"mamba"}
# What is refused, and with which words.
REFUSED = {
    **{("DiTTransformer2DModel of diffusers", grid): "data and z cut samples" for grid in ("z=2", "x=2,y=2,z=2")},
    ("DiTTransformer2DModel of diffusers", "pipe=2,y=2"): "micro-batches cut samples",
    ("albert", "pipe=2,y=2"): "has no row of blocks",
    ("squeezebert", "pipe=2,y=2"): "calls none of its blocks",
}


def right(report: Report, predicted: bool = True) -> None:
    assert report.bytes_agree or not predicted, {
        axis: (report.counted.get(axis), report.predicted.get(axis)) for axis in report.counted
    }
    assert report.replicas_agree
    assert not report.wrong, {what: report.differences[what] for what in report.wrong}


def cases() -> list[object]:
    every = [(name, grid) for name in (*ARCHITECTURES, *FUNCTIONS) for grid in (*GRIDS, "x=2,y=2")]
    short = {(name, grid) for name in (*SHORT, "a user's GPT") for grid in _SHORT_GRIDS[: 1 + (name == "llama")]}
    return [
        pytest.param(name, grid, marks=pytest.mark.slow if (name, grid) in short else pytest.mark.long)
        for name, grid in every
    ]


@pytest.mark.parametrize("name, grid", cases())
def test_an_architecture_trains_as_the_serial_one(
    name: str, grid: str, verified: Callable[[Experiment], Report], tmp_path: Path
) -> None:
    asked = experiment(name, Grid.parse(grid), tmp_path)
    if (name, grid) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name, grid]):
            verified(asked)
    else:
        right(verified(asked), predicted=name not in BYTES_DIFFER)


DECODERS = [name for name, each in ARCHITECTURES.items() if each.family == "decoder"]
# Of these more FLOPs are left whole on each rank of the plane than 30 %,
MORE_FLOPS = {
    "codegen": "its projection is cut into four parts, each with some heads of queries, values and keys",
    "diffllama": "its heads come in pairs, whose values lie apart",
}
# and of these so small fewer parameters than 98 % are cut over both axes.
LESS_CUT = {
    "xglm": "the stream is whole, for the model adds positions to it that it computes without parameters",
    "ctrl": "the same",
}


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in DECODERS]
)
def test_dense_decoders_are_cut_over_the_plane(name: str, tmp_path: Path) -> None:
    source = named(name_of(name, tmp_path))
    with torch.device("meta"):
        model = source.build()
    traced = source.cut(model).traced(model, Grid(x=2, y=2), Batch(4, 16))  # type: ignore[union-attr]
    assert (traced.cut_share >= 0.98) is (name not in LESS_CUT), str(traced)
    assert (traced.flops_share <= 0.30) is (name not in MORE_FLOPS), str(traced)
