"""A model of your own for every command: `cubeloom verify --model examples/nano_gpt.py:build --grid x=2,y=2`.

Plain PyTorch that knows nothing of grids. `build` gives the module; its forward takes a batch by keyword and returns the loss.
`example`, beside it, gives the keyword arguments of one batch of random samples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, POSITIONS, WIDTH, HEADS, BLOCKS = 260, 64, 32, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads = HEADS  # an attribute of the module: on a rank it is the number of the rank's heads
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(samples, tokens, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.out(functional.gelu(self.fc(self.norm2(x))))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:  # `cubeloom sample` asks for the logits
            return logits
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def build() -> nn.Module:
    return NanoGPT()


def example(samples: int, sequence: int, seed: int) -> dict[str, Tensor]:
    drawn = torch.randint(VOCABULARY, (samples, sequence + 1), generator=torch.Generator().manual_seed(seed))
    return {"idx": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
