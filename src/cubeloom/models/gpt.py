"""GPT-2: learned positions, norms before each half of a block, GELU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cubeloom.initial import Initial
from cubeloom.models.layers import (
    MLP,
    Attention,
    CrossEntropy,
    block_pieces,
    check_divides,
    initial,
    positions,
    sequence_length,
)
from cubeloom.models.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocab: int
    positions: int
    hidden: int
    layers: int
    heads: int
    tied: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-5
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_divides("hidden size", self.hidden, "heads", self.heads)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(hidden=config.hidden, heads=config.heads, causal=True, dropout=config.dropout)
        self.norm2 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(hidden=config.hidden, approximate="tanh", dropout=config.dropout)

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        x = x + self.attention(self.norm1(x), sequence)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2 as published, but that attention probabilities are not dropped out (`AttentionCore` says why)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.loss = CrossEntropy(label_smoothing=config.label_smoothing)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """From `[batch, sequence]` the logits `[tokens, vocab]`, or the mean loss where there are targets."""
        sequence = sequence_length(tokens, self.config.positions)
        x = self.begin(tokens)
        for block in self.blocks:
            x = block(x, sequence)
        return self.end(x, targets)

    def begin(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embed(tokens.flatten()) + self.positions(positions(tokens)))  # [tokens, hidden]

    def end(self, x: Tensor, targets: Tensor | None) -> Tensor:
        logits = self.head(self.norm(x))
        return logits if targets is None else self.loss(logits, targets.flatten())

    def pieces(self) -> list[Piece]:
        return [
            Piece(("embed", "positions", "dropout"), lambda _, data: {"x": self.begin(data["tokens"])}),
            *block_pieces(self.blocks),
            Piece(
                ("norm", "head", "loss"),
                lambda carry, data: {"loss": self.end(carry["x"], data["targets"])},
                losses={"loss": "targets"},
            ),
        ]

    def initial(self, name: str) -> Initial:
        """How the named parameter starts: GPT-2's, whose residual stream keeps its variance through the layers."""
        return initial(name, std=0.02, residual_std=0.02 / (2 * self.config.layers) ** 0.5)
