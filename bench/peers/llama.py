"""Llama as a user of torch alone would write it: a linear for each projection, torch's attention, its cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.peers.gpt import mean_loss

EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class LlamaSize:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp_hidden: int
    sequence: int
    samples: int
    vocab: int = 128256
    rotary_base: float = 500000.0
    apart: bool = False  # so large that recipes fit a GPU only one after another

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence

    @property
    def teraflops(self) -> float:
        """Of one step, as of GPT: attention in full, nothing computed twice."""
        keys = self.hidden * self.kv_heads // self.heads
        block = self.hidden * (2 * self.hidden + 2 * keys + 3 * self.mlp_hidden) + 2 * self.sequence * self.hidden
        return 6e-12 * self.tokens * (self.layers * block + self.hidden * self.vocab)


class Block(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_dim = size.hidden // size.heads
        keys, wide = size.kv_heads * self.head_dim, size.mlp_hidden
        self.norm1, self.norm2 = (nn.RMSNorm(size.hidden, eps=EPSILON) for _ in range(2))
        self.q, self.proj = (nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.hidden, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        # [batch, heads, sequence, head_dim]
        query, key, value = (
            layer(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(query, cos, sin), rotated(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = heads.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Llama(nn.Module):
    cos: Tensor  # [sequence, head_dim / 2]
    sin: Tensor

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = (
            nn.RMSNorm(size.hidden, eps=EPSILON),
            nn.Linear(size.hidden, size.vocab, bias=False),
        )

    def tabulate(self, like: Tensor) -> None:
        """Make the tables of rotary positions; once, before the first forward."""
        head_dim = self.size.hidden // self.size.heads
        exponents = torch.arange(0, head_dim, 2, device=like.device) / head_dim
        angles = torch.arange(self.size.sequence, device=like.device)[:, None] / self.size.rotary_base**exponents
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, table.to(like.dtype), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        found: Tensor = self.norm(x)
        return found

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self.head(self.hidden(tokens)), targets)
