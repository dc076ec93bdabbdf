"""GPT as a user of torch alone would write it: plain layers, torch's attention, its cross-entropy, its fused AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Size:
    layers: int
    hidden: int
    heads: int
    sequence: int
    samples: int
    vocab: int = 50304
    apart: bool = False  # so large that recipes fit a GPU only one after another

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence

    @property
    def teraflops(self) -> float:
        """Of one step, as Megatron-LM counts them: attention in full, nothing computed twice."""
        wide = 12 * self.layers * self.hidden
        rest = 1 + self.sequence / (6 * self.hidden) + self.vocab / wide
        return 6e-12 * self.tokens * wide * self.hidden * rest


class Block(nn.Module):
    """Norms before each half. Features of qkv run head by head, so that a cut of them has whole heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_dim))  # [batch, sequence, heads, 3, head_dim]
        query, key, value = heads.transpose(1, 2).unbind(3)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.sequence, size.hidden)
        self.blocks = nn.ModuleList(Block(size.hidden, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocab, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.embed(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.norm(x)
        return found

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self.head(self.hidden(tokens)), targets)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def weights(size: Size, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Values to begin with, by name, so that everybody begins with the same."""
    return drawn(lambda: GPT(size), dtype, device)


def drawn(make: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """For every parameter of the model that this makes: matrices at random, norms at one, biases at zero."""
    with torch.device("meta"):
        shapes = {name: tuple(each.shape) for name, each in make().named_parameters()}
    numbers = torch.Generator(device).manual_seed(0)
    return {name: _draw(name, shape, numbers, device).to(dtype) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], numbers: torch.Generator, device: torch.device) -> Tensor:
    if len(shape) > 1:
        return 0.02 * torch.randn(shape, generator=numbers, device=device)
    return torch.full(shape, float("norm" in name and name.endswith("weight")), device=device)


def gpt(size: Size, values: dict[str, Tensor], compiled: bool) -> GPT:
    with torch.device("meta"):
        model = GPT(size)
    model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
    if compiled:
        for block in model.blocks:
            block.compile()
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused; distributed and plain parameters in groups of their own, which one fused call cannot mix."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in kinds.values()], lr=1e-4, fused=True)
