"""Models that users might write, in which nobody has marked pieces: read by `file.py:function`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LENGTH, BLOCKS = 48, 16, 4, 32, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.c_attn(x).split(c, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList([Block() for _ in range(BLOCKS)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.transformer["h"]
        assert isinstance(found, nn.ModuleList)
        return found

    def begin(self, idx: Tensor) -> Tensor:
        return self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1], device=idx.device))

    def end(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.transformer["ln_f"](x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.begin(idx)
        for block in self.blocks:
            x = block(x)
        return self.end(x, targets)


class Skipping(NanoGPT):
    """Blocks see the embedding, and the end what the first one gave; the loss has a part that counts no targets."""

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = x0 = self.begin(idx)
        first = None
        for block in self.blocks:
            x = block(x + 0.5 * x0)
            first = x if first is None else first
        assert first is not None
        return self.end(x + first, targets) + 0.01 * x.square().mean()


class Plain(NanoGPT):
    """Its last norm has no parameters, and is a layer all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer["ln_f"] = nn.LayerNorm(WIDTH, elementwise_affine=False)


class Reading(NanoGPT):
    """What is between blocks uses a parameter of the model's own in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.begin(idx)
        for block in self.blocks:
            x = block(x * self.scale)
        return self.end(x, targets)


class Repeating(NanoGPT):
    """One block for all."""

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.begin(idx)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.end(x, targets)


class Mixing(NanoGPT):
    """Samples see one another, so that micro-batches would compute something else."""

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.begin(idx)
        for block in self.blocks:
            x = block(x - x.mean(0, keepdim=True))
        return self.end(x, targets)


nano, skipping, plain, reading, repeating, mixing = NanoGPT, Skipping, Plain, Reading, Repeating, Mixing
