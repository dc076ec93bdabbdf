"""A vocabulary that a grid does not divide is padded, and nobody sees it: loss, gradients, weights and bytes are right."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compiling import BACKEND
from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import BERTConfig, Config, GPTConfig, LlamaConfig, OurModel, ResNetConfig, build, config, cut_of
from cubeloom.models.weights import save_weights
from cubeloom.parallel import (
    Batch,
    CutError,
    ParallelConfig,
    ShardingPolicy,
    apply,
    initial_values,
    materialise,
    resolve,
)
from cubeloom.parallel.arranged import arrangement_of
from cubeloom.parallel.arrangement import Arrangement, Run, padded
from cubeloom.parallel.layers import Loss
from cubeloom.parallel.layers.head import CubeHead
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.specs import EmbeddingSpec, LayerSpec, LinearSpec, LossSpec
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.build import plan_stages
from cubeloom.tools.verify import Experiment, verify
from parity import holds

pytestmark = pytest.mark.timeout(120)

ODD = GPTConfig(vocab=23, positions=16, hidden=24, layers=1, heads=12)
UNTIED = replace(ODD, tied=False, label_smoothing=0.1)
LLAMA = LlamaConfig(vocab=23, positions=16, hidden=24, layers=1, heads=12, kv_heads=6, mlp_hidden=24)
BERT = BERTConfig(vocab=23, positions=16, hidden=24, layers=1, heads=12, label_smoothing=0.1)
FEW = replace(UNTIED, vocab=5)  # on y=4 the third rank has one class, and the last nothing but padding


def experiment(model: Config, grid: str, rest: ShardingPolicy | None = None, **changes: Any) -> Experiment:
    on = Grid.parse(grid)
    chosen = {"batch": Batch(2 * on.data * on.z, 12), "steps": 2, "rest": rest or ShardingPolicy(), **changes}
    return Experiment(model=OurModel(model), grid=on, **chosen)


def test_rows_are_padded_at_the_end() -> None:
    assert padded(384, 4) is None
    rows = padded(5, 4)
    assert rows is not None and (rows.whole, rows.held, rows.copies) == (5, 8, 1)
    assert rows.runs(0, 2) == [Run(0, 2, 0)]
    assert rows.runs(4, 6) == [Run(0, 1, 4), Run(1, 1, None)]
    assert rows.runs(6, 8) == [Run(0, 2, None)]
    assert [rows.filled(start, start + 2) for start in range(0, 8, 2)] == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("model", "grid", "rest"),
    [
        (ODD, "y=2", ShardingPolicy()),
        pytest.param(UNTIED, "y=3", ShardingPolicy(), marks=pytest.mark.long),
        (UNTIED, "z=2", ShardingPolicy()),
        (ODD, "z=3", ShardingPolicy(weights="kept")),
        (ODD, "y=2", ShardingPolicy(inputs="regathered")),  # head and loss are not one
        (UNTIED, "x=2,y=2", ShardingPolicy(activations="replicated")),
        (UNTIED, "z=2,y=2", ShardingPolicy(weights="replicated")),
        (BERT, "x=2,y=2,z=2", ShardingPolicy()),
        pytest.param(
            BERT, "y=4", ShardingPolicy(activations="replicated", weights="replicated"), marks=pytest.mark.long
        ),
        (LLAMA, "data=2,y=2", ShardingPolicy()),
        (FEW, "y=4", ShardingPolicy()),
        pytest.param(FEW, "y=4", ShardingPolicy(inputs="regathered"), marks=pytest.mark.long),
        pytest.param(FEW, "x=2,y=4,z=2", ShardingPolicy(), marks=pytest.mark.long),
    ],
)
def test_padding_is_not_seen(ranks: RankPool, model: Config, grid: str, rest: ShardingPolicy) -> None:
    holds(verify(experiment(model, grid, rest), pool=ranks))


@pytest.mark.parametrize(
    ("grid", "changes"),
    [
        ("pipe=2,y=2", {"schedule": generate("1f1b", 2, 4), "batch": Batch(4, 12)}),
        ("pipe=2,z=2,y=2", {"schedule": generate("chimera", 2, 4), "batch": Batch(8, 12)}),
        ("x=2,y=2", {"ways": 2, "batch": Batch(4, 12)}),
        ("data=2,y=2,z=2", {"zero": True}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("z=2,y=2", {"ways": 2, "batch": Batch(8, 12), "rest": ShardingPolicy(activations="replicated")}),
                ("data=3,z=2", {"zero": True}),
            )
        ),
    ],
)
def test_in_pipelines_strands_and_with_sharded_state(ranks: RankPool, grid: str, changes: dict[str, Any]) -> None:
    holds(verify(experiment(ODD, grid, **changes), pool=ranks))


def test_the_vocabulary_of_the_issue(ranks: RankPool) -> None:
    holds(verify(experiment(replace(cast(GPTConfig, config("gpt-tiny")), vocab=383), "x=2,y=2,z=2"), pool=ranks))


@pytest.mark.parametrize("grid", ["y=3", "x=2,y=2,z=2"])
def test_classes_of_images(ranks: RankPool, grid: str) -> None:
    model = replace(cast(ResNetConfig, config("resnet-tiny")), classes=23)
    holds(verify(experiment(model, grid, batch=Batch(24, 1)), pool=ranks))


@pytest.mark.parametrize("grid", ["y=4", "y=2,z=2"])
def test_in_bfloat16(ranks: RankPool, grid: str) -> None:
    report = verify(experiment(FEW, grid, dtype=torch.bfloat16), pool=ranks)
    assert report.ok, report.wrong


def fused(grid: Grid, backend: str | None) -> tuple[list[float], float]:
    """Losses of the whole batch with the head's steps compiled, and again as they are; and what is off among gradients."""
    network = Network(grid)
    found, gradients = [], []
    data = torch.arange(48).view(4, 12) % FEW.vocab
    for how in (None, backend):
        with torch.device("meta"):
            model = build(FEW)
        apply(model, cut_of(model), network, Batch(4, 12), initial_values(model, 0, torch.float64))
        assert isinstance(model.head, CubeHead)
        model.head.chunk_bytes = 16 * 8 * 2  # some rows at a time
        if how is not None:
            model.head.compile_local(how)
        loss = model(tokens=network.share(data), targets=network.share(data))
        loss.backward()
        found.append(loss.item())
        gradients.append(local_of(cast(Tensor, model.head.weight.grad)).clone())
    return found, (gradients[0] - gradients[1]).abs().max().item()


def test_compiled_steps_of_the_head_take_no_class_at_all(ranks: RankPool) -> None:
    """On the last rank of y, which has only padding."""
    for (plain, compiled), off in ranks.run(4, fused, Grid(y=4), BACKEND):
        assert compiled == pytest.approx(plain, rel=1e-12) and off < 1e-14


def train(grid: Grid, make: Any, steps: int) -> list[tuple[bool, bool]]:
    """Of table and head after steps with weight decay: whether this rank has padding, and whether its last row is zero."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(UNTIED)
    apply(model, cut_of(model), network, Batch(4, 12), initial_values(model, 0, torch.float32))
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.1)
    tokens = network.share(torch.arange(48).view(4, 12) % 23)
    for _ in range(steps):
        model(tokens=tokens, targets=tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, weights = [], dict(model.named_parameters())
    for name in ("embed.weight", "head.weight"):
        arrangement = arrangement_of(weights[name], network)
        assert arrangement is not None and arrangement.held == 24
        own = local_of(weights[name])
        last = network.coordinates["y"] == grid.y - 1
        found.append((last, bool((own[-1] == 0).all())))
    return found


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        *(pytest.param(each, marks=pytest.mark.long) for each in (torch.optim.SGD, torch.optim.Adagrad)),
    ],
)
def test_any_optimizer_leaves_padding_zero(ranks: RankPool, make: Any) -> None:
    for of_rank in ranks.run(4, train, Grid(x=2, y=2), make, 3):
        for padding, zero in of_rank:
            assert zero is padding


def lookups(grid: Grid, token: int, target: int) -> str:
    """What is said of a token and of a target."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(ODD)
    apply(model, cut_of(model), network, Batch(2 * grid.z, 12), initial_values(model, 0, torch.float64))
    tokens = torch.zeros(2, 12, dtype=torch.long)
    given = {"tokens": tokens.clone(), "targets": tokens.clone()}
    given["tokens"][0, 3], given["targets"][0, 3] = token, target
    try:
        return f"{model(**given).item()}"
    except IndexError as error:
        return str(error)


@pytest.mark.parametrize("grid", [Grid(y=2), Grid(z=2)])
def test_no_token_and_no_target_is_padding(ranks: RankPool, grid: Grid) -> None:
    assert all(float(said) for said in ranks.run(2, lookups, grid, 22, 22))
    for said in ranks.run(2, lookups, grid, 23, 0):
        assert said == "embed: token id 23 is out of range: it must be from 0 to 22"
    for said in ranks.run(2, lookups, grid, 0, 23):
        assert "loss: target 23 is out of range: it must be from 0 to 22" in said


def logits(grid: Grid) -> tuple[int, int]:
    """Of a model that is asked for logits: how many this rank has, and how many rows."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(ODD)
    apply(model, cut_of(model), network, Batch(2 * grid.z, 12), initial_values(model, 0, torch.float64))
    rows, classes = model(tokens=torch.zeros(2, 12, dtype=torch.long)).shape
    return classes, rows


def test_logits_end_before_padding(ranks: RankPool) -> None:
    assert ranks.run(2, logits, Grid(z=2)) == [(23, 24)] * 2
    assert [classes for classes, _ in ranks.run(3, logits, Grid(y=3))] == [8, 8, 7]


def moved(grid: Grid) -> list[bool]:
    """Whether table and bias are known to be padded after the model was cast, and in a copy of it."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(BERT)
    apply(model, cut_of(model), network, Batch(2, 12), initial_values(model, 0, torch.float64))
    model.to(torch.float32)
    found = [dict(each.named_parameters()) for each in (model, deepcopy(model))]
    names = ("embed.weight", "decoder.bias")
    return [arrangement_of(parameters[name], network) is not None for parameters in found for name in names]


def test_a_cast_and_a_copy_know_of_their_padding(ranks: RankPool) -> None:
    assert ranks.run(2, moved, Grid(y=2)) == [[True] * 4] * 2


def test_weights_of_a_serial_model_are_read(ranks: RankPool, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build(UNTIED)
    file = tmp_path / "weights.safetensors"
    save_weights(materialise(model, initial_values(model, 3, torch.float64)), file)
    assert load_file(file)["head.weight"].shape == (23, 24)
    holds(verify(experiment(UNTIED, "y=2,z=2", weights=str(file)), pool=ranks))


def specs_for(model: nn.Module, cut: Any, grid: str) -> list[Any]:
    return resolve(model, cut, Grid.parse(grid), ShardingPolicy(), Batch(24, 12))


def test_nothing_is_padded_where_it_divides() -> None:
    with torch.device("meta"):
        model = build(ODD)
    for grid in ("x=1", "x=2", "data=2,x=2"):
        assert arranged(specs_for(model, cut_of(model), grid), grid) == []
    found = arranged(specs_for(model, cut_of(model), "y=2,z=2"), "y=2,z=2")
    assert [(type(spec), rows.held, rows.whole) for spec, rows in found] == [
        (EmbeddingSpec, 24, 23),
        (LinearSpec, 24, 23),
        (LossSpec, 24, 23),
    ]


def arranged(specs: list[LayerSpec], grid: str) -> list[tuple[LayerSpec, Arrangement]]:
    """Those whose rows do not lie as in the serial model."""
    config = ParallelConfig.exact(Grid.parse(grid), ShardingPolicy(), Batch(24, 12), 8)
    asked = [spec for spec in specs if isinstance(spec, EmbeddingSpec | LinearSpec | LossSpec)]
    return [(spec, rows) for spec in asked if (rows := spec.arrangement(config)) is not None]


def test_a_head_that_no_loss_names_is_refused() -> None:
    """Padding would be classes of some code's between head and loss."""
    with torch.device("meta"):
        model = build(ODD)
    cut = {**cut_of(model), "loss": Loss()}
    with pytest.raises(CutError, match="layer head: output features 23 cannot be cut over y=2"):
        specs_for(model, cut, "y=2")
    with pytest.raises(
        CutError, match="layer loss: its head is to be 'haed', which the cut does not have as an Expand"
    ):
        specs_for(model, {**cut, "loss": Loss(head="haed")}, "y=2")


def test_stages_do_not_depend_on_padding() -> None:
    """A plan lays out stages by the plain model's sizes."""
    with torch.device("meta"):
        model = build(replace(UNTIED, layers=3))
    schedule = generate("1f1b", 2, 2)
    found = [
        plan_stages(model, cut_of(model), Grid.parse(grid), Batch(24, 12), schedule, ShardingPolicy()).stages
        for grid in ("pipe=2", "pipe=2,y=12")
    ]
    assert found[0] == found[1]


def evaluated(grid: Grid) -> float:
    network = Network(grid)
    with torch.device("meta"):
        model = build(ODD)
    fill = initial_values(model, 0, torch.float64)
    made = Pipeline(model, cut_of(model), network, Batch(4, 12), fill, generate("1f1b", grid.pipe, 2))
    tokens = network.share(torch.arange(48).view(4, 12) % 23)
    return made.evaluate({"tokens": tokens, "targets": tokens})


def test_evaluations_are_the_same(ranks: RankPool) -> None:
    (alone,) = set(ranks.run(1, evaluated, Grid()))
    assert ranks.run(4, evaluated, Grid(pipe=2, y=2)) == pytest.approx([alone] * 4, rel=1e-12)
