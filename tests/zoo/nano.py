"""A small GPT as a user writes it: `nano_gpt` gives a module whose forward gives its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, HEADS = 96, 32, 4


class Attention(nn.Module):
    """Queries, keys and values of one projection, `[3, heads, d]`."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.n_head, width // self.n_head)
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


class Loss(NanoGPT):
    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(idx, targets)[1]


def nano_gpt() -> nn.Module:
    return Loss()
