"""Fewer key-value heads than ranks of y: ranks have copies of a key and value, and train as the serial model does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cubeloom import Grid
from cubeloom.base.initial import Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import AttentionCore, LlamaConfig, OurModel, build, config, cut_of
from cubeloom.models.weights import save_weights
from cubeloom.parallel import (
    Batch,
    Contract,
    Cut,
    CutError,
    Expand,
    Given,
    ParallelConfig,
    ShardingPolicy,
    apply,
    initial_values,
    materialise,
    resolve,
)
from cubeloom.parallel.arranged import arrangement_of, lie_of
from cubeloom.parallel.layers import Attention
from cubeloom.parallel.layout import Layout
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.specs import LinearSpec, shared_copies
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment, verify
from parity import holds

pytestmark = pytest.mark.timeout(120)

TINY = cast(LlamaConfig, config("llama-tiny"))
ONE, TWO = (
    LlamaConfig(vocab=24, positions=16, hidden=48, layers=2, heads=24, kv_heads=heads, mlp_hidden=48)
    for heads in (1, 2)
)


def experiment(model: LlamaConfig, grid: str, rest: ShardingPolicy | None = None, **changes: Any) -> Experiment:
    on = Grid.parse(grid)
    chosen = {"batch": Batch(2 * on.data * on.z, 12), "steps": 2, "rest": rest or ShardingPolicy(), **changes}
    return Experiment(model=OurModel(model), grid=on, **chosen)


@pytest.mark.parametrize(
    ("model", "grid", "rest"),
    [
        (ONE, "y=2", ShardingPolicy()),
        (ONE, "y=4", ShardingPolicy(weights="replicated")),
        (ONE, "x=2,y=2", ShardingPolicy()),
        (ONE, "y=3", ShardingPolicy(activations="replicated")),
        (TWO, "y=4", ShardingPolicy()),
        pytest.param(TWO, "x=2,y=4", ShardingPolicy(), marks=pytest.mark.long),
        pytest.param(TWO, "x=3,y=4", ShardingPolicy(activations="replicated"), marks=pytest.mark.long),
        (TWO, "y=4,z=2", ShardingPolicy()),
        pytest.param(TWO, "y=4,z=4", ShardingPolicy(weights="kept"), marks=pytest.mark.long),
        pytest.param(ONE, "y=2,z=4", ShardingPolicy(inputs="regathered"), marks=pytest.mark.long),
        pytest.param(TWO, "data=2,y=4", ShardingPolicy(), marks=pytest.mark.long),
        pytest.param(TWO, "data=2,y=4,z=2", ShardingPolicy(weights="replicated"), marks=pytest.mark.long),
    ],
)
def test_copies_train_as_one(ranks: RankPool, model: LlamaConfig, grid: str, rest: ShardingPolicy) -> None:
    on = Grid.parse(grid)
    holds(verify(experiment(model, grid, rest, batch=Batch(on.x * 2 * on.data * on.z, 12)), pool=ranks))


@pytest.mark.parametrize(
    ("grid", "changes"),
    [
        ("pipe=2,y=4,z=2", {"schedule": generate("zb-h1", 2, 4), "batch": Batch(8, 12)}),
        ("y=4,x=2", {"ways": 2, "batch": Batch(4, 12)}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("pipe=2,y=4", {"schedule": generate("chimera", 2, 4), "batch": Batch(4, 12), "zero": True}),
                ("data=2,y=4,z=2", {"zero": True}),
                ("pipe=2,y=4", {"schedule": generate("1f1b", 2, 4), "batch": Batch(4, 12)}),
                ("pipe=2,data=2,y=4", {"schedule": generate("chimera", 2, 4), "batch": Batch(8, 12), "zero": True}),
                ("pipe=2,y=4", {"schedule": generate("pipedream-2bw", 2, 4), "batch": Batch(4, 12)}),
                ("y=4,z=2", {"ways": 2, "batch": Batch(8, 12)}),
                ("data=2,y=4", {"zero": True}),
                ("data=2,y=4,z=2", {"zero": True, "rest": ShardingPolicy(weights="replicated")}),
            )
        ),
    ],
)
def test_in_pipelines_strands_and_with_sharded_state(ranks: RankPool, grid: str, changes: dict[str, Any]) -> None:
    holds(verify(experiment(TWO, grid, **changes), pool=ranks))


def test_the_grid_of_the_issue(ranks: RankPool) -> None:
    report = verify(experiment(replace(TINY, kv_heads=2), "y=4", steps=3), pool=ranks)
    holds(report)
    assert report.ok


def test_with_a_vocabulary_that_does_not_divide(ranks: RankPool) -> None:
    holds(verify(experiment(replace(TWO, vocab=23, tied=True), "data=2,y=4,z=2", zero=True), pool=ranks))


def test_in_bfloat16(ranks: RankPool) -> None:
    for how in ("float32", "model"):
        rest = ShardingPolicy(gradients=cast(Any, how))
        report = verify(experiment(TWO, "y=4,z=2", rest, dtype=torch.bfloat16), pool=ranks)
        assert report.bytes_agree and report.replicas_agree and not report.wrong, (how, report.wrong)


class Biased(nn.Module):
    """Grouped queries with biases."""

    def __init__(self, heads: int, queries: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, heads * (queries + 2) * 2)
        self.core = AttentionCore(head_dim=2, queries_per_key=queries)
        self.proj = nn.Linear(heads * queries * 2, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.core(self.qkv(x), 4))

    def initial(self, name: str) -> Normal:
        return Normal(0.3)


def biased_cut(heads: int, queries: int) -> Cut:
    return {
        "qkv": Expand(heads=heads, queries=queries),
        "core": Attention(heads, queries),
        "proj": Contract(heads=heads, queries=queries),
    }


def gradients_of(grid: Grid, rest: ShardingPolicy, passes: int) -> list[tuple[str, float]]:
    """How far those of a module with biases are off the serial module's, accumulated over some backwards."""
    network = Network(grid)
    with torch.device("meta"):
        plain, model = Biased(2, 4), Biased(2, 4)
    fill = initial_values(plain, 0, torch.float64)
    materialise(plain, fill)
    rows_cut = ("data", "z", "y") if rest.activations == "sharded" else ("data", "z")
    given = Given(torch.empty(16, 24), Layout.of(rows=rows_cut, features="x"))
    state = apply(model, biased_cut(2, 4), network, Batch(4, 4), fill, rest, example=lambda _: {"x": given})
    x = torch.linspace(-1, 1, 16 * 24, dtype=torch.float64).sin().view(16, 24)
    here, rows = network.coordinates, 16 // grid.y
    mine = x[here["y"] * rows : (here["y"] + 1) * rows] if rest.activations == "sharded" else x
    part = 24 // grid.x
    for number in range(passes):
        plain(x).square().sum().backward()
        share = model(mine[:, here["x"] * part : (here["x"] + 1) * part])
        slope = 2 * share.detach()  # of the sum of squares over all ranks' parts
        if number + 1 < passes:
            with state.gradients.accumulating():
                share.backward(slope)
        else:
            share.backward(slope)
    theirs = {name: cast(Tensor, each.grad) for name, each in plain.named_parameters()}
    found = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        lie = lie_of(parameter, network)
        for run in lie.runs:
            own = local_of(parameter.grad)[run.start : run.stop]
            at = tuple(slice(a, a + n) for a, n in zip(lie.offset_of(run), own.shape, strict=True))
            found.append((name, (own - theirs[name][at]).abs().max().item()))
    return found


@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("rest", [ShardingPolicy(), ShardingPolicy(activations="replicated")])
@pytest.mark.parametrize("grid", [Grid(y=4), Grid(y=4, x=2)])
def test_biases_have_copies_too(ranks: RankPool, grid: Grid, rest: ShardingPolicy, passes: int) -> None:
    for of_rank in ranks.run(grid.world, gradients_of, grid, rest, passes):
        assert {name for name, _ in of_rank} == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
        for name, off in of_rank:
            assert off < 1e-10, name


def twice(grid: Grid) -> float:
    """Two backwards add up, without a reduction over replicas: how far copies are from twice one backward's."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(ONE)
    apply(model, cut_of(model), network, Batch(2, 12), initial_values(model, 0, torch.float64))
    tokens = torch.arange(24).view(2, 12)
    weight = dict(model.named_parameters())["blocks.0.attention.qkv.weight"]
    found = []
    for _ in range(2):
        model(tokens=tokens, targets=tokens).backward()
        found.append(local_of(cast(Tensor, weight.grad)).clone())
    return (found[1] - 2 * found[0]).abs().max().item()


def test_gradients_of_two_backwards_add_up(ranks: RankPool) -> None:
    assert max(ranks.run(2, twice, Grid(y=2))) < 1e-14


def cores(grid: Grid) -> tuple[list[int], list[tuple[int, int]]]:
    """Queries per key of this rank's attention, and rows of its weight: in the whole, and held."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(TWO)
    apply(model, cut_of(model), network, Batch(2 * grid.x, 12), initial_values(model, 0, torch.float64))
    weights = [each for name, each in model.named_parameters() if name.endswith("qkv.weight")]
    rows = [arrangement_of(each, network) for each in weights]
    queries = [each.queries_per_key for each in model.modules() if isinstance(each, AttentionCore)]
    return queries, [(each.whole, each.held) for each in rows if each is not None]


def test_attention_has_this_rank_s_queries(ranks: RankPool) -> None:
    assert ranks.run(2, cores, Grid(y=2)) == [([12, 12], [(56, 56)] * 2)] * 2
    assert ranks.run(4, cores, Grid(y=4)) == [([6, 6], [(56, 64)] * 2)] * 4


def forms_of(model: nn.Module, cut: Cut, grid: str, samples: int = 24) -> list[Any]:
    return resolve(model, cut, Grid.parse(grid), ShardingPolicy(), Batch(samples, 12))


NEITHER = "key-value heads 3 cannot be cut over y=4, of which neither divides the other; the nearest that work: "
FEW = (
    "the 6 queries of each of 2 key-value heads cannot be cut into 4 parts, as y=8 has ranks for a head; "
    "the nearest that work: "
)


@pytest.mark.parametrize(
    ("heads", "queries", "y", "said", "sizes"),
    [
        (3, 4, 4, NEITHER, [3, 6]),
        (2, 6, 8, FEW, [6, 12]),
        (2, 2, 8, FEW.replace("6 queries", "2 queries"), [4]),
    ],
)
def test_what_cannot_be_divided_is_refused(heads: int, queries: int, y: int, said: str, sizes: list[int]) -> None:
    with torch.device("meta"):
        model = Biased(heads, queries)
    cut = biased_cut(heads, queries)
    with pytest.raises(CutError) as caught:
        forms_of(model, cut, f"y={y}")
    assert said + " and ".join(f"y={size}" for size in sizes) in str(caught.value)

    def complains(size: int) -> bool:
        spec = LinearSpec(name="q", k=1, n=heads * (queries + 2), side="x", bias=False, heads=heads, queries=queries)
        config = ParallelConfig.exact(Grid(y=size), ShardingPolicy(), Batch(1, 1), 8)
        return any(rule.broken for rule in spec.rules(config) if rule.label == "heads over x and y")

    assert [size for size in range(sizes[0], sizes[-1] + 1) if not complains(size)] == sizes
    assert all(map(complains, range(sizes[-1] + 1, y)))


def test_rows_with_copies_are_named_so() -> None:
    with torch.device("meta"):
        model = build(TWO)
    with pytest.raises(CutError, match="output features 56, with copies 64 cannot be cut over y=4·z=3"):
        forms_of(model, cut_of(model), "y=4,z=3")


def test_what_is_no_attention_is_refused() -> None:
    with torch.device("meta"):
        model = Biased(2, 4)
    model.core = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(CutError, match="layer core is a Identity without queries_per_key: it cannot be an Attention"):
        forms_of(model, biased_cut(2, 4), "y=4")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"core": None}, "on y=4 a key has 2 of its 4 queries, and the cut names no Attention(heads=2, queries=4)"),
        ({"core": Attention(4, 2)}, "and the cut names no Attention(heads=2, queries=4) that knows it"),
        (
            {"qkv": Expand(heads=2, queries=5)},
            "layer qkv: 24 features are not heads=2 keys, as many values and queries=5 for each",
        ),
        (
            {"proj": Contract(heads=2, queries=3)},
            "layer proj: 16 features are not heads=2 with queries=3 each",
        ),
        ({"proj": Contract(heads=2)}, "layer proj: heads 2 cannot be cut over y=4"),
        ({"qkv": Expand(heads=2)}, "layer qkv: heads 2 cannot be cut over y=4"),
    ],
)
def test_a_cut_that_does_not_know_the_heads_is_refused(changed: dict[str, Any], said: str) -> None:
    with torch.device("meta"):
        model = Biased(2, 4)
    cut = {name: kind for name, kind in {**biased_cut(2, 4), **changed}.items() if kind is not None}
    with pytest.raises(CutError) as caught:
        forms_of(model, cut, "y=4")
    assert said in str(caught.value)


def test_nothing_changes_where_heads_suffice() -> None:
    with torch.device("meta"):
        model = build(TINY)
    for grid in ("x=1", "y=2", "y=8,x=3", "z=2"):
        specs = forms_of(model, cut_of(model), grid)
        assert shared_copies(specs, Grid.parse(grid)) == set()


def test_weights_of_a_serial_model_are_read(ranks: RankPool, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build(TWO)
    file = tmp_path / "weights.safetensors"
    save_weights(materialise(model, initial_values(model, 3, torch.float64)), file)
    holds(verify(experiment(TWO, "y=4,z=2", weights=str(file)), pool=ranks))
