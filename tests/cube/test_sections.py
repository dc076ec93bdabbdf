"""Fused projections whose outputs are sections one behind another: each rank has its part of every section."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from cubeloom import Grid
from cubeloom.base.initial import Initial, Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import MeanSquaredError
from cubeloom.parallel import (
    Batch,
    Contract,
    Cut,
    CutError,
    Expand,
    ShardingPolicy,
    apply,
    initial_values,
    materialise,
    resolve,
)
from cubeloom.parallel import layers as declared
from cubeloom.parallel.arranged import lie_of
from cubeloom.parallel.arrangement import Run, sectioned
from cubeloom.parallel.parameter import local_of
from cubeloom.train import BlockOptimizer, ShardedOptimizer
from cubeloom.train.checkpoint import load_checkpoint, newest, read_index, save_checkpoint
from cubeloom.train.checkpoint.shard import Shard
from cubeloom.train.clipping import norm_of, pieces

pytestmark = pytest.mark.timeout(120)

VOCAB, WIDTH, SEQUENCE, SAMPLES, HEAD = 24, 24, 4, 8, 2
BATCH = Batch(SAMPLES, SEQUENCE)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Core(nn.Module):
    """Attention of queries, keys and values one behind another."""

    def __init__(self, queries: int) -> None:
        super().__init__()
        self.queries_per_key = queries

    def forward(self, qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(0, (-1, SEQUENCE)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        keys = heads.shape[1] // (self.queries_per_key + 2)
        query, key, value = heads.split((keys * self.queries_per_key, keys, keys), 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


class Fused(nn.Module):
    """Grouped queries and a gated MLP, both of one projection with a bias."""

    def __init__(self, heads: int = 4, queries: int = 2) -> None:
        super().__init__()
        self.heads, self.queries = heads, queries
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.core = nn.Linear(WIDTH, sum(self.sections)), Core(queries)
        self.proj = nn.Linear(heads * queries * HEAD, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 32), nn.Linear(32, WIDTH)
        self.head, self.loss = nn.Linear(WIDTH, VOCAB), nn.CrossEntropyLoss()

    @property
    def sections(self) -> tuple[int, int, int]:
        keys = self.heads * HEAD
        return keys * self.queries, keys, keys

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())
        x = x + self.proj(self.core(self.qkv(x)))
        gate, up = self.gate_up(x).chunk(2, -1)
        x = x + self.down(functional.silu(gate) * up)
        loss: Tensor = self.loss(self.head(x), targets.flatten())
        return loss

    def initial(self, name: str) -> Initial:
        return Normal(0.4)

    def cut(self, **changed: Any) -> Cut:
        return {
            "embed": declared.Embedding(),
            "qkv": Expand(heads=self.heads, queries=self.queries, sections=self.sections),
            "core": declared.Attention(self.heads, self.queries),
            "proj": Contract(heads=self.heads, queries=self.queries),
            "gate_up": Expand(sections=(32, 32)),
            "down": Contract(),
            "head": Expand(sharded_output=True),
            "loss": declared.Loss(),
            **changed,
        }


class Images(nn.Module):
    """A transposed convolution, whose weight has its outputs in the second dimension, gives sections of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.away = nn.ConvTranspose2d(8, 24, 3, padding=1)
        self.wide, self.narrow, self.last = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)
        self.loss = MeanSquaredError()

    def forward(self, images: Tensor) -> Tensor:
        x = self.away(self.first(images).tanh()).sigmoid()
        part = x.shape[1] // 3
        x = self.wide(x[:, : 2 * part]) + self.narrow(x[:, 2 * part :])
        loss: Tensor = self.loss(self.last(x), images)
        return loss

    def initial(self, name: str) -> Initial:
        return Normal(0.4)

    def example(self, samples: int) -> dict[str, Tensor]:
        return {"images": torch.empty(samples, 3, 4, 4, device="meta")}

    def cut(self) -> Cut:
        return {
            "first": declared.ColwiseFromReplicated("x"),
            "away": Expand(sections=(16, 8)),
            "wide": Contract(),
            "narrow": Contract(),
            "last": declared.RowwiseToReplicated("x"),
            "loss": declared.SquaredLoss("x"),
        }


def made(kind: str) -> Any:
    with torch.device("meta"):
        match kind:
            case "images":
                return Images()
            case "few keys":
                return Fused(heads=2, queries=4)
            case "one key":
                return Fused(heads=1, queries=8)
            case _:
                return Fused()


def data_of(model: Any, step: int = 0) -> dict[str, Tensor]:
    if isinstance(model, Images):
        return {"images": torch.linspace(-1, 1 + step, SAMPLES * 48, dtype=torch.float64).sin().view(SAMPLES, 3, 4, 4)}
    tokens = (torch.arange(SAMPLES * SEQUENCE) * (7 + step)).view(SAMPLES, SEQUENCE) % VOCAB
    return {"tokens": tokens, "targets": (tokens * 3 + 1) % VOCAB}


def difference(kind: str, grid: str, rest: ShardingPolicy, zero: bool) -> float:
    """How far loss, gradients and their norm are from the serial model's, on this rank."""
    network, serial, model = Network(Grid.parse(grid)), made(kind), made(kind)
    fill = initial_values(model, 0, torch.float64)
    materialise(serial, fill)
    state = apply(model, model.cut(), network, BATCH, fill, rest)
    sharded = ShardedOptimizer(model.parameters(), state.gradients, ADAMW) if zero else None
    data = data_of(model)
    expected = serial(**data)
    expected.backward()
    loss = model(**{name: network.share(each) for name, each in data.items()})
    loss.backward()
    worst = (loss - expected).abs().item()
    theirs = {name: each.grad for name, each in serial.named_parameters()}
    for name, parameter in model.named_parameters():
        rows, grad = None, parameter.grad
        if grad is None:
            assert sharded is not None
            rows, local = sharded.parts[parameter].rows, sharded.parts[parameter].tensor.grad
        else:
            local = local_of(grad)
        assert local is not None
        lie = lie_of(parameter, network, rows)
        for run, own in lie.parts(local):
            at = tuple(slice(start, start + n) for start, n in zip(lie.offset_of(run), own.shape, strict=True))
            worst = max(worst, (own - theirs[name][at]).abs().max().item())
    norm = norm_of(pieces(model.named_parameters(), network, sharded), network)
    expected_norm = torch.stack([each.square().sum() for each in theirs.values()]).sum().sqrt()
    return max(worst, (norm - expected_norm).abs().item())


def test_a_rank_has_its_part_of_every_section() -> None:
    rows = sectioned((4, 2, 2), 2, (1, 1, 1))
    assert rows is not None and (rows.whole, rows.held, rows.copies) == (8, 8, 1)
    assert rows.runs(0, 4) == [Run(0, 2, 0), Run(2, 1, 4), Run(3, 1, 6)]
    assert rows.runs(4, 8) == [Run(0, 2, 2), Run(2, 1, 5), Run(3, 1, 7)]
    assert sectioned((4, 2, 2), 1, (1, 1, 1)) is None and sectioned((8,), 2, (1,)) is None


def test_of_a_section_with_copies_the_first_counts() -> None:
    rows = sectioned((8, 2), 4, (1, 2))
    assert rows is not None and (rows.whole, rows.held, rows.copies) == (10, 12, 2)
    assert [run.first for run in rows.segments if run.copies == 2] == [8, 8, 9, 9]
    assert [run.counts for run in rows.segments if run.copies == 2] == [True, False, True, False]


@pytest.mark.parametrize(
    ("kind", "grid", "rest"),
    [
        ("keys", "y=2", ShardingPolicy()),
        pytest.param("keys", "y=4", ShardingPolicy(weights="replicated"), marks=pytest.mark.long),
        ("keys", "x=2,y=2", ShardingPolicy()),
        pytest.param("keys", "x=4", ShardingPolicy(), marks=pytest.mark.long),
        ("keys", "x=2,y=2", ShardingPolicy(activations="replicated")),
        pytest.param("keys", "z=2,y=2", ShardingPolicy(), marks=pytest.mark.long),
        ("keys", "data=2,z=2,y=2", ShardingPolicy(weights="kept", inputs="regathered")),
        ("few keys", "y=4", ShardingPolicy()),
        ("few keys", "z=2,y=4", ShardingPolicy(activations="replicated")),
        pytest.param("few keys", "data=2,y=4", ShardingPolicy(), marks=pytest.mark.long),
        ("one key", "x=2,y=2", ShardingPolicy()),
        ("images", "y=2", ShardingPolicy()),
        pytest.param("images", "y=4", ShardingPolicy(weights="replicated"), marks=pytest.mark.long),
        pytest.param("images", "x=2,y=2", ShardingPolicy(), marks=pytest.mark.long),
        ("images", "data=2,z=2,y=2", ShardingPolicy()),
    ],
)
def test_sections_train_as_the_serial_model_does(ranks: RankPool, kind: str, grid: str, rest: ShardingPolicy) -> None:
    world = Grid.parse(grid).world
    for zero in (False, True) if "data" in grid else (False,):
        assert max(ranks.run(world, difference, kind, grid, rest, zero)) < 1e-12


def train(kind: str, grid: str, folder: Path, first: int, last: int, zero: bool = False) -> list[float]:
    """Losses of the steps from `first` on; begins from the newest checkpoint if it begins late, and leaves one at the end."""
    network, model = Network(Grid.parse(grid)), made(kind)
    state = apply(model, model.cut(), network, BATCH, initial_values(model, 0, torch.float64))
    optimizer: BlockOptimizer | ShardedOptimizer = (
        ShardedOptimizer(model.parameters(), state.gradients, ADAMW)
        if zero
        else BlockOptimizer(model.parameters(), ADAMW)
    )
    if first:
        found = newest(folder)
        assert found is not None
        load_checkpoint(found, model, optimizer, network)
    losses = []
    for step in range(first, last):
        loss = model(**{name: network.share(each) for name, each in data_of(model, step).items()})
        loss.backward()
        losses.append(network.everybody.all_reduce(loss.detach()[None], "loss").wait().item() / network.grid.world)
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, last, model, optimizer, network, {})
    return losses


@pytest.mark.parametrize(
    ("kind", "grids"),
    [
        ("keys", ["x=2,y=2", "z=4", "y=4", "x=1"]),
        ("few keys", ["z=2,y=4", "y=2", "x=2,y=2", "y=4"]),
        ("images", ["y=2,z=2", "x=1", "y=4", "x=2,y=2"]),
    ],
)
def test_a_checkpoint_of_one_grid_goes_on_on_any_other(
    ranks: RankPool, tmp_path: Path, kind: str, grids: list[str]
) -> None:
    never_stopped = ranks.run(1, train, kind, "x=1", tmp_path / "serial", 0, 4)[0]
    for step, grid in enumerate(grids):
        (loss,) = ranks.run(Grid.parse(grid).world, train, kind, grid, tmp_path, step, step + 1)[0]
        assert loss == pytest.approx(never_stopped[step], rel=1e-10), grid


def test_one_of_sharded_state_too(ranks: RankPool, tmp_path: Path) -> None:
    never_stopped = ranks.run(1, train, "few keys", "x=1", tmp_path / "serial", 0, 2)[0]
    for step, grid in enumerate(["data=2,y=4", "data=2,z=2"]):
        (loss,) = ranks.run(Grid.parse(grid).world, train, "few keys", grid, tmp_path, step, step + 1, True)[0]
        assert loss == pytest.approx(never_stopped[step], rel=1e-10), grid


def test_a_checkpoint_has_the_serial_model_s_tensors(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, train, "few keys", "y=4", tmp_path, 0, 0)
    found = newest(tmp_path)
    assert found is not None
    model = made("few keys")
    materialise(model, initial_values(model, 0, torch.float64))
    for name, expected in model.named_parameters():
        whole = torch.zeros_like(expected)
        for block in read_index(found)[f"weights/{name}"].blocks:
            at = tuple(slice(start, start + n) for start, n in zip(block.offset, block.shape, strict=True))
            with safe_open(found / block.file, "pt") as file:
                whole[at] = file.get_tensor(block.entry(f"weights/{name}"))
        assert torch.equal(whole, expected), name


def test_rows_that_count_are_written_in_as_few_blocks_as_can_be() -> None:
    runs = (Run(0, 2, 4), Run(2, 1, 6), Run(3, 1, 8, copies=2, counts=False), Run(4, 1, 9), Run(5, 1, None))
    local = torch.arange(6.0)[None]
    found = list(Shard(local, (1, 10), (0, 4), runs, dim=1).written())
    assert [(each.offset, each.local.tolist()) for each in found] == [((0, 4), [[0, 1, 2]]), ((0, 9), [[4]])]


# --- what is refused ---


def refusal(cut: Cut, grid: str = "y=2", model: Any = None) -> str:
    with pytest.raises(CutError) as caught:
        resolve(made("keys") if model is None else model, cut, Grid.parse(grid), ShardingPolicy(), BATCH)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gate_up": Expand(sections=(32, 16))}, "sections=(32, 16) are 48 output features, and it has 64"),
        ({"gate_up": Expand(sections=(64, 0))}, "sections=(64, 0) are 64 output features, and it has 64"),
        ({"gate_up": Expand(sections=(61, 3))}, "section 0 of the output features, 61 cannot be cut over y=2"),
        ({"gate_up": Expand(sections=(32, 32), turn=True)}, "which turn=True would redistribute"),
        (
            {"qkv": Expand(heads=4, queries=2, sections=(8, 8, 16))},
            "all queries, all keys and all values, sections=(16, 8, 8), and not (8, 8, 16)",
        ),
        ({"qkv": Expand(heads=4, sections=(16, 10, 6))}, "sections=(16, 10, 6) are not heads=4 equal heads each"),
        ({"head": Expand(sharded_output=True, sections=(12, 12)), "loss": declared.Loss(head="head")}, "are classes"),
        # Code that takes them otherwise than they lie.
        ({"gate_up": Expand()}, "chunk over dimension 1 of [32, 64/y]"),
        ({"gate_up": Expand(sections=(16, 48))}, "chunk over dimension 1 of [32, (16 | 48)/y]"),
        ({"gate_up": Expand(sections=(16, 16, 16, 16))}, "layer down (Linear), Contract() in the cut, takes features"),
        ({"qkv": Expand(heads=4)}, "split over dimension 1 of"),
    ],
)
def test_sections_that_are_none_are_refused(changed: dict[str, Any], said: str) -> None:
    assert said in refusal(made("keys").cut(**changed))


class Odd(nn.Module):
    """Takes the outputs of a fused projection in some way."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.fused, self.down, self.code = nn.Linear(8, 48), nn.Linear(16, 8), code

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.code(self.fused(x)))
        return y

    def example(self, samples: int) -> dict[str, Tensor]:
        return {"x": torch.empty(samples, 8, device="meta")}


def odd(code: Any, sections: tuple[int, ...], grid: str = "y=2") -> None:
    with torch.device("meta"):
        model = Odd(code)
    cut = {"fused": Expand(sections=sections), "down": Contract()}
    resolve(model, cut, Grid.parse(grid), ShardingPolicy(activations="replicated"), BATCH)


TWICE, UNEQUAL = (16, 16, 16), (16, 24, 8)
RIGHT = {
    "chunk": (lambda y: y.chunk(3, -1)[1], TWICE),
    "split": (lambda y: y.split(y.shape[-1] // 3, -1)[0], TWICE),
    "view": (lambda y: y.view(len(y), 3, -1).prod(1), TWICE),
    "unflatten, two of three": (lambda y: y.unflatten(-1, (3, -1))[:, 1:].amax(1), TWICE),
    "slice": (lambda y: y.tanh()[:, : y.shape[1] // 3], UNEQUAL),
    "narrow": (lambda y: y.narrow(1, 0, y.shape[1] // 3), UNEQUAL),
    "of one more dimension": (lambda y: y[:, : y.shape[1] // 3, None].expand(-1, -1, 2).prod(-1), UNEQUAL),
    "two sections, then one": (lambda y: y[:, : y.shape[1] // 6 * 5][..., : y.shape[1] // 3] + 1, UNEQUAL),
    "in heads": (
        lambda y: y.unflatten(-1, (-1, 2)).split([y.shape[1] // k for k in (6, 4, 12)], 1)[0].flatten(1),
        UNEQUAL,
    ),
    "joined with another": (lambda y: (y * y.sigmoid() + torch.ones_like(y)).chunk(3, 1)[2], TWICE),
}
WRONG = {
    "whole sizes": (lambda y: y.split((16, 24, 8), -1)[0], UNEQUAL, "y.split|split takes|fails on the parts"),
    "a whole slice": (lambda y: y[:, :16], UNEQUAL, "a rank takes 0 to 16 of its part, where that is 0 to 8"),
    "half a section": (lambda y: y[:, : y.shape[1] // 6].repeat(1, 2), UNEQUAL, "which y cuts"),
    "over two": (lambda y: y.chunk(3, -1)[1], UNEQUAL, "chunk over dimension 1 of [8, (16 | 24 | 8)/y]"),
    "pairs": (lambda y: y.unflatten(-1, (-1, 3))[..., 0], TWICE, "those are no parts of the new dimensions"),
    "with what lies otherwise": (lambda y: (y + y.flip(1)).chunk(3, 1)[0], TWICE, "flip"),
    "with other sections": (
        lambda y: (y.chunk(2, 1)[0] + y.chunk(2, 1)[1])[:, : y.shape[1] // 3],
        (16, 8, 8, 16),
        "dimension 1 is cut as (16 | 8)/y in one and cut as (8 | 16)/y in the other",
    ),
    "every other": (lambda y: y[:, ::3], TWICE, "an index into dimension 1"),
    "named": (lambda y: y.narrow(dim=1, start=0, length=y.shape[1] // 3), UNEQUAL, "takes all its numbers by place"),
    "summed": (lambda y: y.cumsum(1).chunk(3, 1)[0], TWICE, "cumsum"),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("grid", ["y=2", "y=4", "z=2,y=2"])
def test_code_at_the_ends_of_sections_is_accepted(name: str, grid: str) -> None:
    odd(*RIGHT[name], grid)


@pytest.mark.parametrize("name", WRONG)
def test_other_code_is_refused(name: str) -> None:
    code, sections, said = WRONG[name]
    with pytest.raises(CutError) as caught:
        odd(code, sections)
    assert any(each in str(caught.value) for each in said.split("|")), caught.value
