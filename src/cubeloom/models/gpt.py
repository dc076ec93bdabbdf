"""GPT-2: learned positions, norms before each half of a block, GELU."""

from __future__ import annotations

from torch import Tensor, nn

from cubeloom.base.initial import Initial
from cubeloom.models.configs import GPTConfig
from cubeloom.models.decoder import Decoder, PreNormBlock
from cubeloom.models.layers import MLP, Attention, CrossEntropy, initial, positions


class Block(PreNormBlock):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(hidden=config.hidden, heads=config.heads, causal=True, dropout=config.dropout)
        self.norm2 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(hidden=config.hidden, approximate="tanh", dropout=config.dropout)


class GPT(Decoder):
    """GPT-2 as published, except that attention probabilities have no dropout (`AttentionCore` says why)."""

    beginners = ("embed", "positions", "dropout")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.positions_most = config.positions
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.loss = CrossEntropy(label_smoothing=config.label_smoothing)

    def begin(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embed(tokens.flatten()) + self.positions(positions(tokens)))  # [tokens, hidden]

    def initial(self, name: str) -> Initial:
        """The initialisation of the named parameter: GPT-2's, which keeps the residual stream's variance over the
        layers.
        """
        return initial(name, std=0.02, residual_std=0.02 / (2 * self.config.layers) ** 0.5)
