"""Layers that the models share, besides torch's own.

Activations are `[rows, features]`, with one row per token of the batch. No layer here reads a size from a
configuration: on a grid it gets some of the sequences and some of the features, and computes only those.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base.errors import UserError
from cubeloom.base.initial import Constant, Initial, Normal
from cubeloom.base.parts import parts_of
from cubeloom.models.pieces import Piece


class AttentionCore(nn.Module):
    """Attention of queries, keys and values that are already projected. It has no parameters.

    Features are all queries, all keys and all values, concatenated, each `[heads, head_dim]`; queries of one key are
    neighbours. Kernels thus read and write long contiguous runs of memory, and the same part of each of the three is a
    smaller attention, which is how heads are cut over devices. The output has the layout of the queries.

    Attention probabilities have no dropout: GPT-2 and BERT had it, later models do not, and fused kernels draw a mask
    that depends on how the heads are cut.
    """

    def __init__(
        self, *, head_dim: int, queries_per_key: int = 1, causal: bool = True, rotary_base: float | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.queries_per_key = queries_per_key
        self.causal = causal
        self.rotary_base = rotary_base

    def forward(self, qkv: Tensor, sequence: int) -> Tensor:
        # [batch, sequence, heads, head_dim]
        parts = self.parts(qkv.unflatten(0, (-1, sequence)).unflatten(2, (-1, self.head_dim)))
        query, key, value = (each.transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=self.queries_per_key > 1
        )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

    def parts(self, heads: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, rotated if positions are rotary."""
        keys = heads.shape[2] // (self.queries_per_key + 2)
        query, key, value = parts_of(heads, (keys * self.queries_per_key, keys, keys), dim=2)
        if self.rotary_base is not None:
            cos, sin = turns(heads, self.rotary_base)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return query, key, value

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, queries_per_key={self.queries_per_key}, "
            f"causal={self.causal}, rotary_base={self.rotary_base}"
        )


class AttentionByHead(AttentionCore):
    """Features are ordered by head, `[heads, 3, head_dim]`: a contiguous run of them is a smaller attention."""

    def __init__(self, *, head_dim: int, causal: bool = True) -> None:
        super().__init__(head_dim=head_dim, causal=causal)

    def parts(self, heads: Tensor) -> tuple[Tensor, ...]:
        return heads.unflatten(2, (-1, 3)).unbind(3)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions for `[batch, sequence, heads, head_dim]`: feature i is rotated with feature i + head_dim/2.

    Pairing halves rather than neighbours is Hugging Face's convention, which its Llama weights follow. The halves are
    not flipped: in compiled code that took 13.7 ms of a step of Llama 1B on an H200, and this, in torch's recipe, 1.9.
    """
    left, right = heads.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def turns(heads: Tensor, base: float) -> tuple[Tensor, ...]:
    """The rotation of these heads, `[sequence, 1, head_dim/2]`."""
    compute = _turns_as_they_are if torch.compiler.is_compiling() else _turns
    found = compute(heads.shape[1], heads.shape[-1], base, heads.device)
    return tuple(each.to(heads.dtype)[:, None, :] for each in found)


def _turns(sequence: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The cosine and sine of the rotation, `[sequence, head_dim/2]`.

    They are always float32, as in the training of published weights: in bfloat16 far positions would collapse into one,
    and in float64 the model would differ in the last digits.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    places = torch.arange(sequence, device=device, dtype=torch.float32)
    angles = places[:, None] * (1.0 / base**exponents)
    return angles.cos(), angles.sin()


# An opaque operator, because compiled code would compute other last digits.
_turns_as_they_are = torch.library.custom_op("cubeloom::turns", _turns, mutates_args=())


@_turns_as_they_are.register_fake
def _(sequence: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    found = torch.empty(sequence, head_dim // 2, device=device)
    return found, torch.empty_like(found)


class SwiGLU(nn.Module):
    """`silu(gate) * up` of the concatenated gate and up projections."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = parts_of(gate_up, 2 * (gate_up.shape[-1] // 2,), dim=-1)
        return functional.silu(gate) * up


class CrossEntropy(nn.Module):
    """The mean cross-entropy of the rows whose target is not -100."""

    ignore_index = -100

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            logits, targets, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
        )

    def extra_repr(self) -> str:
        return f"label_smoothing={self.label_smoothing}"


class MeanSquaredError(nn.Module):
    """The mean over all elements."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - target).square().mean()


class Attention(nn.Module):
    """Multi-head attention as in GPT-2 and BERT: with biases, and dropout of its contribution to the residual stream."""

    def __init__(self, *, hidden: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.core = AttentionByHead(head_dim=hidden // heads, causal=causal)
        self.proj = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        return self.dropout(self.proj(self.core(self.qkv(x), sequence)))


class MLP(nn.Module):
    """An MLP four times as wide, as in GPT-2 and BERT. `approximate`: torch's name of the GELU variant."""

    def __init__(self, *, hidden: int, approximate: str, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.act = nn.GELU(approximate=approximate)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))


def sequence_length(tokens: Tensor, longest: int) -> int:
    """The length of the sequences in `[batch, sequence]`; refused if the model has no positions for it."""
    sequence = tokens.shape[1]
    if sequence > longest:
        raise UserError(f"a sequence of {sequence} tokens is too long: the model has {longest} positions")
    return sequence


def positions(tokens: Tensor) -> Tensor:
    """The position of each token in its sequence, in the order of `tokens.flatten()`."""
    batch, sequence = tokens.shape
    return torch.arange(sequence, device=tokens.device).repeat(batch)


def initial(name: str, *, std: float, residual_std: float) -> Initial:
    """Biases zero, norms one, projections to the residual stream with `residual_std`, the rest with `std`."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if kind == "bias":
        return Constant(0.0)
    if "norm" in layer:
        return Constant(1.0)
    return Normal(residual_std if layer in ("proj", "down") else std)


def fan_ins(model: nn.Module) -> dict[str, int]:
    """The number of inputs that each output of a linear or convolution sums, by the weight's name."""
    return {name: weight.shape[1:].numel() for name, weight in model.named_parameters() if weight.dim() > 1}


def initial_by_fan(name: str, fans: Mapping[str, int], *, gain: float) -> Initial:
    """Biases zero, norms one, weights with the variance `gain / fan`."""
    if name.endswith(".bias"):
        return Constant(0.0)
    return Normal((gain / fans[name]) ** 0.5) if name in fans else Constant(1.0)


def block_pieces(blocks: nn.ModuleList) -> list[Piece]:
    """The pieces of a row of Transformer blocks."""

    def piece(number: int) -> Piece:
        return Piece(
            (f"blocks.{number}",),
            # The block is looked up when it runs, because a cut may have replaced its layers, or a stage the block.
            lambda carry, data: {"x": blocks[number](carry["x"], data["tokens"].shape[1])},
        )

    return [piece(number) for number in range(len(blocks))]
