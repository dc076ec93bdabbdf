"""Llama: rotary positions, grouped queries, RMS norms, SwiGLU, no biases."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.base.initial import Initial
from cubeloom.models.decoder import Decoder, PreNormBlock
from cubeloom.models.layers import (
    AttentionCore,
    CrossEntropy,
    SwiGLU,
    check_divides,
    initial,
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab: int
    positions: int  # the longest sequence: rotary positions have no table that would end
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp_hidden: int
    rotary_base: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = False
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_divides("hidden size", self.hidden, "heads", self.heads)
        check_divides("number of heads", self.heads, "key-value heads", self.kv_heads)
        if self.head_dim % 2:
            raise UserError(
                f"rotary positions turn features in pairs, but a head has {self.head_dim} of them "
                f"(hidden {self.hidden}, heads {self.heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def queries_per_key(self) -> int:
        return self.heads // self.kv_heads


class GroupedAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        features = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden, features, bias=False)
        self.core = AttentionCore(
            head_dim=config.head_dim, queries_per_key=config.queries_per_key, rotary_base=config.rotary_base
        )
        self.proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        return self.proj(self.core(self.qkv(x), sequence))


class GatedMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden, 2 * config.mlp_hidden, bias=False)
        self.act = SwiGLU()
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate_up(x)))


class Block(PreNormBlock):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = GroupedAttention(config)
        self.norm2 = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = GatedMLP(config)


class Llama(Decoder):
    beginners = ("embed",)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.positions_most = config.positions
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.loss = CrossEntropy(label_smoothing=config.label_smoothing)

    def begin(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens.flatten())  # [tokens, hidden]

    def initial(self, name: str) -> Initial:
        """How the named parameter starts: as Hugging Face starts a Llama."""
        return initial(name, std=0.02, residual_std=0.02)
