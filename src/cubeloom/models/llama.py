"""Llama: rotary positions, grouped queries, RMS norms, SwiGLU, no biases."""

from __future__ import annotations

from torch import Tensor, nn

from cubeloom.base.initial import Initial
from cubeloom.models.configs import LlamaConfig
from cubeloom.models.decoder import Decoder, PreNormBlock
from cubeloom.models.layers import AttentionCore, CrossEntropy, SwiGLU, initial


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
        """The initialisation of the named parameter, as in Hugging Face's Llama."""
        return initial(name, std=0.02, residual_std=0.02)
