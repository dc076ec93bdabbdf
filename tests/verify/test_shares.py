"""How much of a model is cut, and of its FLOPs how many a rank computes: the same for presets, folders and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from cubeloom import Grid
from cubeloom.models import preset
from cubeloom.models.named import named
from cubeloom.parallel import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.specs import cut_share
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment, Report
from serial_runs import Verified

TRACED = ShardingPolicy(activations="replicated")
USERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.wide, self.narrow, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32)

    def forward(self, tokens, targets):
        x = self.table(tokens)
        x = x + self.narrow(torch.tanh(self.wide(x)))
        return nn.functional.cross_entropy(self.head(x).view(-1, 32), targets.view(-1))

def build():
    return Net()
"""


def llama_folder(folder: Path) -> str:
    config = LlamaConfig(
        vocab_size=64,
        max_position_embeddings=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return str(folder)


def shares(report: Report) -> tuple[float, float | None]:
    assert report.ok
    return report.cut_share, report.flops_share


def test_of_a_preset_they_are_those_of_its_layers(verified: Verified) -> None:
    experiment = Experiment(model=preset("gpt-tiny"), grid=Grid(x=2, y=2), batch=Batch(4, 8), steps=1)
    cut, flops = shares(verified(experiment))
    whole = {name: each.numel() for name, each in experiment.skeleton().named_parameters()}
    vectors = sum(each.numel() for each in experiment.skeleton().parameters() if each.dim() == 1)
    assert cut == pytest.approx(1 - vectors / sum(whole.values()), abs=1e-12)  # biases and norms lie on one axis
    assert flops == 0.25


def test_weights_that_rest_whole_along_an_axis_are_not_cut_over_it() -> None:
    source = preset("gpt-tiny")
    with_z = Experiment(model=source, grid=Grid(z=2), batch=Batch(4, 8))
    rests = {"freed": ShardingPolicy(weights="freed"), "replicated": ShardingPolicy(weights="replicated")}
    config = {kept: ParallelConfig.exact(with_z.grid, rest, with_z.batch, 8) for kept, rest in rests.items()}
    assert cut_share(with_z.specs(), config["freed"]) > 0.9
    assert cut_share(with_z.specs(), config["replicated"]) < 0.03  # of the table of positions
    alone = ParallelConfig.exact(Grid(data=2), ShardingPolicy(), with_z.batch, 8)
    assert cut_share(with_z.specs(), alone) == 1.0  # no axis of the cube has to cut anything


@pytest.mark.slow
def test_of_a_hugging_face_folder_they_are_those_that_tracing_finds(verified: Verified, tmp_path: Path) -> None:
    source = named(llama_folder(tmp_path))
    experiment = Experiment(model=source, grid=Grid(x=2, y=2), batch=Batch(4, 8), rest=TRACED, steps=1)
    cut, flops = shares(verified(experiment))
    model = experiment.skeleton()
    traced = source.cut(model).traced(model, experiment.grid, experiment.batch)  # type: ignore[union-attr]
    assert cut == traced.cut_share > 0.95
    assert flops == traced.flops_share == 0.25


def test_of_a_file_and_in_parts_of_samples(verified: Verified, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(USERS, encoding="utf-8")
    source = named(f"{tmp_path / 'net.py'}:build")
    grid = Grid(data=2, y=2)
    cut, flops = shares(verified(Experiment(model=source, grid=grid, batch=Batch(4, 8), rest=TRACED, steps=1)))
    assert flops == 0.25
    assert 0.97 < cut < 1


@pytest.mark.slow
def test_the_largest_stage_says_how_much_a_pipeline_s_rank_computes(verified: Verified) -> None:
    schedule = generate("1f1b", 2, 4)
    experiment = Experiment(model=preset("gpt-tiny"), grid=Grid(pipe=2), batch=Batch(4, 8), schedule=schedule, steps=1)
    flops = shares(verified(experiment))[1]
    again = shares(verified(Experiment(**{**vars(experiment), "recompute": True})))[1]
    assert flops is not None and again is not None
    assert 0.5 <= flops < 0.75
    assert flops * 1.1 < again <= flops * 4 / 3  # each forward once more, as far as torch needs it


@pytest.mark.long
def test_what_is_not_counted_is_not_said(verified: Verified) -> None:
    report = verified(Experiment(model=preset("gpt-tiny"), grid=Grid(x=2), batch=Batch(4, 8), steps=1, compile=True))
    assert report.flops_share is None and json.dumps(report.as_json())
