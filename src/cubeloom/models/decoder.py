"""The common parts of GPT and Llama: tokens, a row of blocks on a residual stream, a norm and a head."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from cubeloom.models.layers import CrossEntropy, block_pieces, sequence_length
from cubeloom.models.pieces import Piece


class PreNormBlock(nn.Module):
    """Each half of the block normalises its input from the residual stream, and adds its output to it."""

    norm1: nn.Module
    attention: nn.Module
    norm2: nn.Module
    mlp: nn.Module

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        x = x + self.attention(self.norm1(x), sequence)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module, ABC):
    """`begin` computes the start of the residual stream; `beginners` are the modules that it uses."""

    beginners: tuple[str, ...]
    positions_most: int
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Linear
    loss: CrossEntropy

    @abstractmethod
    def begin(self, tokens: Tensor) -> Tensor:
        """From `[batch, sequence]` to `[tokens, hidden]`."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """From `[batch, sequence]` the logits `[tokens, vocab]`, or with targets the mean loss."""
        sequence = sequence_length(tokens, self.positions_most)
        x = self.begin(tokens)
        for block in self.blocks:
            x = block(x, sequence)
        return self.end(x, targets)

    def end(self, x: Tensor, targets: Tensor | None) -> Tensor:
        logits = self.head(self.norm(x))
        return logits if targets is None else self.loss(logits, targets.flatten())

    def pieces(self) -> list[Piece]:
        return [
            Piece(self.beginners, lambda _, data: {"x": self.begin(data["tokens"])}),
            *block_pieces(self.blocks),
            Piece(
                ("norm", "head", "loss"),
                lambda carry, data: {"loss": self.end(carry["x"], data["targets"])},
                losses={"loss": "targets"},
            ),
        ]
