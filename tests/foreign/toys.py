"""Small modules, each with one thing to see in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

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
