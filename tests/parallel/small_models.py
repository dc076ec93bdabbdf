"""A small Transformer and a small network on images, into which a test puts code of its own, and their right cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom import Grid
from cubeloom.base.initial import Constant, Initial, Normal
from cubeloom.base.turns import interleave
from cubeloom.comm import Network
from cubeloom.models import MeanSquaredError
from cubeloom.parallel import Batch, Cut, ShardingPolicy, apply, initial_values, materialise
from cubeloom.parallel import layers as declared
from cubeloom.parallel.layers import Contract, Embedding, Expand, Loss, Norm, Table
from cubeloom.parallel.parameter import block_of, local_of

WIDTH, HEADS, VOCAB, SEQUENCE, SAMPLES = 8, 4, 16, 4, 8
BATCH = Batch(SAMPLES, SEQUENCE)
Code = Callable[..., Any]


def nothing(x: Tensor, *_: Any) -> Tensor:
    return x


def heads_apart(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[samples, heads, sequence, features]` of each, from features that lie head by head."""
    grouped = qkv.unflatten(0, (-1, SEQUENCE)).unflatten(-1, (-1, 3, WIDTH // HEADS))
    query, key, value = (each.transpose(1, 2) for each in grouped.unbind(3))
    return query, key, value


def attention(qkv: Tensor) -> Tensor:
    mixed = functional.scaled_dot_product_attention(*heads_apart(qkv), is_causal=True)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


class Transformer(nn.Module):
    """`code` takes the place of what is done somewhere: "tokens", "stream", "core", "inner", "logits" or "loss"."""

    def __init__(self, **code: Code) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.norm1, self.norm2, self.norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head, self.loss = nn.Linear(WIDTH, VOCAB), nn.CrossEntropyLoss()
        self.code = code

    def do(self, place: str, plain: Code, *arguments: Any) -> Any:
        return self.code.get(place, plain)(*arguments)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        samples, sequence = tokens.shape
        places = self.do("places", lambda _: torch.arange(sequence).repeat(samples), tokens)
        x = self.embed(tokens.flatten()) + self.positions(places)
        x = x + self.proj(self.do("core", attention, self.qkv(self.norm1(x))))
        x = self.do("stream", nothing, x, tokens, self)
        x = x + self.down(self.do("inner", functional.gelu, self.up(self.norm2(x))))
        logits = self.do("logits", nothing, self.head(self.norm(x)))
        found: Tensor = self.do("loss", self.loss, logits, targets.flatten())
        return found

    def initial(self, name: str) -> Initial:
        return Constant(1.0) if "norm" in name and name.endswith("weight") else Normal(0.5)


CUT: dict[str, declared.Declared] = {
    "embed": Embedding(),
    "positions": Table(),
    "norm1": Norm(),
    "qkv": Expand(heads=HEADS),
    "proj": Contract(heads=HEADS),
    "norm2": Norm(),
    "up": Expand(),
    "down": Contract(),
    "norm": Norm(),
    "head": Expand(sharded_output=True),
    "loss": Loss(),
}


class Joined(nn.Module):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return interleave(first, second, 4)


class Images(nn.Module):
    """A block with a skip connection, to which a number for each sample is added; two tensors are joined in turns."""

    def __init__(self, **code: Code) -> None:
        super().__init__()
        self.time, self.shared, self.apart = nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 16)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.inner_norm = nn.GroupNorm(4, 8), nn.BatchNorm2d(16)
        self.away, self.back = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.skip, self.grouped = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.concat, self.last = Joined(), nn.Conv2d(16, 3, 1)
        self.loss = MeanSquaredError()
        self.code = code

    def do(self, place: str, plain: Code, *arguments: Any) -> Any:
        return self.code.get(place, plain)(*arguments)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        time = self.do("time", lambda each, _: self.shared(each), torch.tanh(self.time(times)), self)
        x = self.first(images)
        inner = self.away(functional.silu(self.norm(x))) + self.apart(time)[:, :, None, None]
        inner = self.back(self.do("inner", functional.silu, self.inner_norm(inner)))
        x = self.do("joined", self.concat, inner + self.skip(x), self.grouped(x))
        found: Tensor = self.do("loss", self.loss, self.last(x), images)
        return found

    def example(self, samples: int) -> dict[str, Tensor]:
        return {
            "images": torch.empty(samples, 3, 6, 6, device="meta"),
            "times": torch.empty(samples, 4, device="meta"),
        }

    def initial(self, name: str) -> Initial:
        return Normal(0.4)


IMAGE_CUT: dict[str, declared.Declared] = {
    "time": declared.Replicated(),
    "shared": declared.CopyToRegion(8),
    "apart": declared.ColwiseFromReplicated("y"),
    "first": declared.ColwiseFromReplicated("x"),
    "norm": Norm(),
    "away": Expand(),
    "inner_norm": Norm(side="y"),
    "back": Contract(),
    "skip": declared.RowwiseScatter("x"),
    "grouped": declared.Grouped("x"),
    "concat": declared.Concat("x", turns=4),
    "last": declared.RowwiseToReplicated("x"),
    "loss": declared.SquaredLoss("x"),
}


def without_values(kind: type[nn.Module], code: dict[str, Code]) -> Any:
    with torch.device("meta"):
        return kind(**code)


def data_of(kind: type[nn.Module]) -> dict[str, Tensor]:
    if kind is Transformer:
        tokens = torch.randint(VOCAB, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(0))
        return {"tokens": tokens, "targets": (tokens * 3 + 1) % VOCAB}
    images = torch.linspace(-1, 1, SAMPLES * 108, dtype=torch.float64).sin().view(SAMPLES, 3, 6, 6)
    return {"images": images, "times": torch.linspace(0, 2, SAMPLES * 4, dtype=torch.float64).cos().view(SAMPLES, 4)}


def difference(
    kind: type[nn.Module],
    cut: Cut,
    code: dict[str, Code],
    network: Network,
    rest: ShardingPolicy,
    unchecked: bool = False,
) -> float:
    """How far the cut model is from the serial one: the largest difference of the loss or a gradient, on this rank."""
    serial, model = without_values(kind, code), without_values(kind, code)
    fill = initial_values(model, 0, torch.float64)
    materialise(serial, fill)
    apply(model, cut, network, BATCH, fill, rest, unchecked=unchecked)
    data = data_of(kind)
    expected = serial(**data)
    expected.backward()
    loss = model(**{name: network.share(each) for name, each in data.items()})
    loss.backward()
    worst = (loss - expected).abs().item()
    for name, theirs in serial.named_parameters():
        mine = model.get_parameter(name)
        assert theirs.grad is not None and mine.grad is not None, name
        part = theirs.grad[block_of(mine, network).slices]
        worst = max(worst, (local_of(mine.grad) - part).abs().max().item())
    return worst


def on(grid: str) -> Grid:
    return Grid.parse(grid)
