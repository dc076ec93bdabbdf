"""Models of Hugging Face and diffusers, as they come, on grids: against their serial selves, and the bytes as predicted."""

from __future__ import annotations

import copy

import pytest
import torch

import cubeloom
from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel.foreign import mean_over_batch

from .parity import Difference, compare, largest_difference
from .theirs import MODELS, batch, build, loss_of

GRIDS = ["x=2", "y=2", "z=2", "data=2", "x=2,y=2", "x=2,z=2", "data=2,z=2"]


def steps(grid: Grid) -> dict[str, Difference]:
    network = Network(grid)
    return {name: compare(network, build(name), batch(name, 4), loss_of) for name in MODELS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid", [pytest.param(grid, marks=() if grid in ("x=2,y=2", "z=2") else pytest.mark.long) for grid in GRIDS]
)
def test_a_step_is_the_serial_one(grid: str, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    for found in ranks.run(where.world, steps, where):
        for name, difference in found.items():
            difference.check(name)


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_and_convolution_is_cut_but_for_known_ones(name: str) -> None:
    """On a plane. What is left: heads that share the embedding's weight, and convolutions from or to three colours."""
    proposal = cubeloom.cut(build(name), Grid(x=2, y=2), lambda module: loss_of(module, batch(name, 2)))
    left = {each.name for each in proposal.whole if each.kind in ("Linear", "Conv1D", "Conv2d")}
    assert (
        left
        == {
            "gpt2": {"lm_head"},
            "llama": set(),
            "bert": {"cls.predictions.decoder"},
            "vit": {"vit.embeddings.patch_embeddings.projection"},
            "unet": {"conv_in", "conv_out"},
        }[name]
    )


@pytest.mark.parametrize(
    "name, first, then",
    [
        ("gpt2", "transformer.h.1.mlp.c_fc", {"transformer.h.1.mlp.c_proj"}),
        ("llama", "model.layers.1.mlp.gate_proj", {"model.layers.1.mlp.down_proj"}),
        ("bert", "bert.encoder.layer.1.intermediate.dense", {"bert.encoder.layer.1.output.dense"}),
        ("vit", "vit.layers.1.mlp.fc1", {"vit.layers.1.mlp.fc2"}),
        ("unet", "time_embedding.linear_1", {"time_embedding.linear_2"}),
    ],
)
def test_their_perceptrons_are_chains(name: str, first: str, then: set[str]) -> None:
    proposal = cubeloom.cut(build(name), Grid(x=2, y=2), lambda module: loss_of(module, batch(name, 2)))
    layers = {layer.name: layer for layer in proposal.layers}
    assert layers[first].enters and not layers[first].leaves
    assert all(not layers[each].enters and layers[each].spec.side != layers[first].spec.side for each in then)
    assert not any(layers[each].enters for each in layers if each.endswith("time_emb_proj"))  # a third link


def train(grid: Grid, recomputing: bool) -> tuple[list[float], float]:
    """GPT-2 with its own loss, which is in single precision, and AdamW: the losses' differences and the weights'."""
    network, serial = Network(grid), build("gpt2")
    model = copy.deepcopy(serial)
    tokens = batch("gpt2", 4)
    mine = {key: network.share(value) for key, value in tokens.items()}
    state = cubeloom.cut(model, grid, mine).apply(model, network)
    if recomputing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3) for each in (serial, model)]
    differences = []
    for _ in range(3):
        expected, loss = serial(**tokens).loss, mean_over_batch(model(**mine).loss, state)
        for each, optimizer in zip((expected, loss), optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        differences.append(abs(loss.item() - expected.item()))
    wanted, found = ({key: each.data for key, each in some.named_parameters()} for some in (serial, model))
    return differences, largest_difference(found, wanted, network)


@pytest.mark.slow
@pytest.mark.parametrize("recomputing", [False, True], ids=["plain", "recomputing"])
def test_training_with_their_own_loss(recomputing: bool, ranks: RankPool) -> None:
    for losses, weights in ranks.run(4, train, Grid(x=2, z=2), recomputing):
        assert max(losses) < 1e-5
        assert weights < 1e-6
