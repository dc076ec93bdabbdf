"""BERT: bidirectional attention, norms after each half of a block, prediction of masked tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.base.initial import Initial
from cubeloom.models.configs import BERTConfig
from cubeloom.models.layers import MLP, Attention, CrossEntropy, block_pieces, initial, positions, sequence_length
from cubeloom.models.pieces import Piece


class Block(nn.Module):
    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = Attention(hidden=config.hidden, heads=config.heads, causal=False, dropout=config.dropout)
        self.norm1 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(hidden=config.hidden, approximate="none", dropout=config.dropout)
        self.norm2 = nn.LayerNorm(config.hidden, eps=config.norm_eps)

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        x = self.norm1(x + self.attention(x, sequence))
        return self.norm2(x + self.mlp(x))


class FirstToken(nn.Module):
    """From `[tokens, features]` the rows of each sequence's first token, `[batch, features]`."""

    def forward(self, rows: Tensor, sequence: int) -> Tensor:
        return rows[::sequence]


class BERT(nn.Module):
    """BERT as published, except that attention probabilities have no dropout (`AttentionCore` says why).

    Every sequence has full length: there is no padding mask.
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.types = nn.Embedding(config.types, config.hidden)
        self.embed_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.act = nn.GELU()
        self.transform_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.decoder = nn.Linear(config.hidden, config.vocab)
        if config.tied:
            self.decoder.weight = self.embed.weight
        self.loss = CrossEntropy(label_smoothing=config.label_smoothing)
        if config.next_sentence:
            self.first = FirstToken()
            self.pooler = nn.Linear(config.hidden, config.hidden)
            self.next_sentence = nn.Linear(config.hidden, 2)
            self.next_sentence_loss = CrossEntropy()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        types: Tensor | None = None,
        next_sentence: Tensor | None = None,
    ) -> Tensor:
        """From `[batch, sequence]` the logits `[tokens, vocab]`, or with targets the mean loss.

        `types`: the segment of each token, by default the first. With targets and `next_sentence`, `[batch]` of 0 (the
        second segment follows the first) and 1, the loss of that prediction is added.
        """
        sequence = sequence_length(tokens, self.config.positions)
        if next_sentence is not None and not self.config.next_sentence:
            raise UserError("this BERT does not guess the next sentence; its configuration needs next_sentence=True")
        x = self.begin(tokens, types)
        for block in self.blocks:
            x = block(x, sequence)
        return self.end(x, sequence, targets, next_sentence)

    def begin(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        segments = torch.zeros_like(tokens) if types is None else types
        x = self.embed(tokens.flatten()) + self.positions(positions(tokens)) + self.types(segments.flatten())
        return self.dropout(self.embed_norm(x))  # [tokens, hidden]

    def end(self, x: Tensor, sequence: int, targets: Tensor | None, next_sentence: Tensor | None) -> Tensor:
        logits = self.decoder(self.transform_norm(self.act(self.transform(x))))
        if targets is None:
            return logits
        loss = self.loss(logits, targets.flatten())
        if next_sentence is None:
            return loss
        pooled = torch.tanh(self.pooler(self.first(x, sequence)))  # [batch, hidden]
        return loss + self.next_sentence_loss(self.next_sentence(pooled), next_sentence)

    def pieces(self) -> list[Piece]:
        last = ["transform", "act", "transform_norm", "decoder", "loss"]
        if self.config.next_sentence:
            last += ["first", "pooler", "next_sentence", "next_sentence_loss"]
        return [
            Piece(
                ("embed", "positions", "types", "embed_norm", "dropout"),
                lambda _, data: {"x": self.begin(data["tokens"], data.get("types"))},
            ),
            *block_pieces(self.blocks),
            Piece(
                tuple(last),
                lambda carry, data: {
                    "loss": self.end(carry["x"], data["tokens"].shape[1], data["targets"], data.get("next_sentence"))
                },
                losses={"loss": "targets", "next_sentence_loss": "next_sentence"},
            ),
        ]

    def initial(self, name: str) -> Initial:
        """The initialisation of the named parameter, as in Hugging Face's BERT."""
        return initial(name, std=0.02, residual_std=0.02)
