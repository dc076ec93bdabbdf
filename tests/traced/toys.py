"""Small modules, each with one thing to see in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, INNER = 8, 12


class Toy(nn.Module, ABC):
    """Two linears, and a third for those that want one."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.gate = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class Chain(Toy):
    """With an activation that is written out, as older models do."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3.0)))))


class Swish(torch.autograd.Function):
    """Its own result is kept for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.sigmoid()
        ctx.save_for_backward(x, result)
        return x * result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, result = ctx.saved_tensors
        return gradient * (result + x * result * (1 - result))


class Centred(torch.autograd.Function):
    """Of which only the backward mixes features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(-1, keepdim=True)


class Linear(torch.autograd.Function):
    """With a parameter of its own, whose gradient is a sum over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Functions(Toy):
    """The first may have a part of the features; the second may not, as its backward shows; the third has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).cos())

    def forward(self, x: Tensor) -> Tensor:
        y = Linear.apply(x, self.table)
        return self.down(Swish.apply(self.up(y))) + self.down(Centred.apply(self.gate(y)))


class Gated(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class InPlace(Toy):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h *= 2
        h += self.gate(x)
        return self.down(functional.relu(h, inplace=True))


class Residual(Toy):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h) + h[..., :WIDTH]


class Softmax(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


class Scaled(Toy):
    """By a vector of whole features."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale)


class Temperature(Scaled):
    """By one trained number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale.sum())


class Dropped(Toy):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(probability)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.up(x)))


class Hidden(Toy):
    """Gives what is inside to the caller as well."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        h = self.up(x)
        return {"hidden": h, "out": self.down(h)}


class Remembered(Toy):
    """Keeps what is inside."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.up(x)]
        return self.down(self.seen[0])


class Twice(Toy):
    """One layer used twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(torch.tanh(self.down(torch.relu(self.up(x)))))))


class Peeking(Toy):
    """Uses a layer's weight without the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + functional.linear(x, self.up.weight).sum(-1, keepdim=True)


class Fan(Toy):
    """One chain of three, with two ends; and one that contradicts it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, INNER) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(x)))
        return (self.first(h) - self.second(h)).sum(-1)


class Contradiction(Toy):
    """A product of features that lie on x and features that lie on y."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(torch.relu(self.up(x))) * self.up(x))


class Images(nn.Module):
    def __init__(self, groups: int = 1, padding_mode: Literal["zeros", "reflect"] = "zeros") -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=groups, padding_mode=padding_mode)
        self.wider = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.max_pool2d(torch.relu(self.first(x)), 2)
        return self.head(self.norm(self.wider(torch.relu(self.second(h)))).mean((-2, -1)))


class Attention(nn.Module):
    """Queries, keys and values in one projection, `[3, heads, d]`, as many small models have it."""

    heads = 4

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * inner)
        self.out = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Grouped(nn.Module):
    """Four heads of queries for two of keys and values, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.num_key_value_groups, self.head_dim = 4, 2, 2, 4
        self.q, self.k, self.v = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (
            each(x).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
            for each in (self.k, self.v)
        )
        k, v = (each[:, :, None].expand(-1, -1, self.num_key_value_groups, -1, -1).flatten(1, 2) for each in (k, v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Repeated(Grouped):
    """As models of Hugging Face share keys: where there is one query of each, nothing is repeated and nothing is said of it."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        groups = self.num_key_value_groups
        q, k, v = (
            each(x).view(batch, length, heads, self.head_dim).transpose(1, 2)
            for each, heads in (
                (self.q, self.num_heads),
                (self.k, self.num_key_value_heads),
                (self.v, self.num_key_value_heads),
            )
        )
        if groups > 1:
            y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            y = functional.scaled_dot_product_attention(q, k, v)
        k, v = (self.repeated(each, groups) for each in (k, v))
        y = y + (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))

    @staticmethod
    def repeated(heads: Tensor, groups: int) -> Tensor:
        batch, count, length, width = heads.shape
        if groups == 1:
            return heads
        wide = heads[:, :, None, :, :].expand(batch, count, groups, length, width)
        return wide.reshape(batch, count * groups, length, width)


class Buffered(Toy):
    """A table that is computed, and added to features that are cut."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.linspace(-1, 1, 5 * INNER).view(5, INNER).sin()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device) + 1
        return self.down(self.up(x) + self.get_buffer("table")[places])


class Asserting(Toy):
    """It asserts something of values that the run without values does not have."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        assert h.max().item() <= 1
        assert (
            (h * h).sum() >= 0
        ), "never printed"  # fmt: skip
        return self.down(h)


class Solving(Toy):
    """Small matrices of each row, as heads of a linear attention have them."""

    def __init__(self) -> None:
        super().__init__(inner=16)

    def forward(self, x: Tensor) -> Tensor:
        matrices = torch.eye(2, dtype=x.dtype, device=x.device) + self.up(x).unflatten(-1, (-1, 2, 2)).tril(-1)
        right = self.gate(x).unflatten(-1, (-1, 2, 2))
        return self.down(torch.linalg.solve_triangular(matrices, right, upper=False).flatten(-3))


class Mixing(Toy):
    """Samples depend on each other, and rows of positions do not on the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        return self.down(self.up(x - x.mean(0)).tanh())


class Biased(Attention):
    """With a trained table of positions that is added to the stream, and a constant bias for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.linspace(-1, 1, 3 * WIDTH).view(1, 3, WIDTH).sin())
        self.scores = Scores()

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(self.scores.embed(x)) + self.positions
        slopes = torch.arange(1, self.heads + 1).view(1, self.heads, 1, 1) / 8
        return x + self.scores(self.norm(x), slopes)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.embed, self.q, self.o = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
        weights = (q @ q.transpose(-1, -2) + bias).softmax(-1)
        return self.o((weights @ q).transpose(1, 2).reshape(batch, length, -1))


class TorchLayers(nn.Module):
    """torch's own encoder layer, and its attention of trained queries to what a mask leaves of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.queries = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).sin())
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        found, _ = self.attention(self.queries.expand(len(x), -1, -1), y, y, key_padding_mask=x[..., 0].detach() > 0.99)
        return found


class Frozen(Chain):
    """A layer before the chain, whose weight a test freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.first(x)))
