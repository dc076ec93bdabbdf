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

from .architectures import ARCHITECTURES, FUNCTIONS, SHORT, SHORT_FUNCTIONS, name_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of transformers' own
GRIDS = ("x=2", "y=2", "z=2", "x=2,y=2", "x=2,y=2,z=2", "pipe=2,y=2")
_SHORT_GRIDS = ("x=2,y=2", "z=2")
_BOTH_GRIDS = ("llama",)


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


# What is refused, and with which words.
REFUSED = {
    ("albert", "pipe=2,y=2"): "has no row of blocks",
    ("squeezebert", "pipe=2,y=2"): "calls none of its blocks",
    ("DiTTransformer2DModel of diffusers", "pipe=2,y=2"): "row of blocks cannot be cut: .* used in several places",
    **{
        (
            f"{name} of {owner}",
            "pipe=2,y=2",
        ): "is a batch norm, whose statistics would be those of each of 2 micro-batches"
        for owner, names in (
            ("timm", ("ResNet", "EfficientNet", "MobileNetV3")),
            ("torchvision", ("ResNet", "ResNeXt", "MobileNetV2", "DenseNet", "EfficientNet", "MaxVit")),
        )
        for name in names
    },
}


def right(report: Report) -> None:
    assert report.bytes_agree, {axis: (report.counted.get(axis), report.predicted.get(axis)) for axis in report.counted}
    assert report.replicas_agree
    assert not report.wrong, {what: report.differences[what] for what in report.wrong}


def cases() -> list[object]:
    every = [(name, grid) for name in (*ARCHITECTURES, *FUNCTIONS) for grid in GRIDS]
    short = {(name, grid) for name in (*SHORT, *SHORT_FUNCTIONS) for grid in _SHORT_GRIDS[: 1 + (name in _BOTH_GRIDS)]}
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
        right(verified(asked))


@pytest.mark.parametrize("grid", ["x=2", "z=2"])
def test_labels_that_are_dropped_at_random_are_refused(grid: str) -> None:
    """Each rank would drop others."""
    source = named(str(Path(__file__).parent / "diffusion.py:dit_that_drops_labels"))
    with torch.device("meta"):
        model = source.build()
    with pytest.raises(UserError, match="rand draws random numbers"):
        source.cut(model).traced(model, Grid.parse(grid), Batch(4, 16))  # type: ignore[union-attr]


DECODERS = [name for name, each in ARCHITECTURES.items() if each.family == "decoder"]
# Of these more FLOPs are left whole on each rank of the plane than 30 %,
MORE_FLOPS = {
    "codegen": "its heads lie in four parts, of each of which a rank has some: no block for the projection behind",
    "diffllama": "its heads come in pairs, whose values lie apart",
}


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in DECODERS]
)
def test_dense_decoders_are_cut_over_the_plane(name: str, tmp_path: Path) -> None:
    source = named(name_of(name, tmp_path))
    with torch.device("meta"):
        model = source.build()
    traced = source.cut(model).traced(model, Grid(x=2, y=2), Batch(4, 16))  # type: ignore[union-attr]
    assert traced.cut_share >= 0.98, str(traced)
    assert (traced.flops_share <= 0.30) is (name not in MORE_FLOPS), str(traced)
