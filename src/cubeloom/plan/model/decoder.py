"""A decoder of any sizes as a list of layers, without its modules: what `derive` finds for a preset of these sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cubeloom.parallel.specs import (
    AttentionSpec,
    EmbeddingSpec,
    LayerSpec,
    LinearSpec,
    LossSpec,
    NormSpec,
    PointwiseSpec,
    TableSpec,
)
from cubeloom.pipeline.volume import StageOutput
from cubeloom.plan.model.model import Model, Piece


@dataclass(frozen=True)
class DecoderSizes:
    """`gated`: a Llama, with a gated MLP, rotary positions, RMSNorm and no biases; otherwise a GPT."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    sequence: int
    gated: bool = False
    rotary: bool = False
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Of the matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        block = attention + (3 if self.gated else 2) * self.hidden * self.mlp
        return self.layers * block + (1 if self.tied else 2) * self.vocabulary * self.hidden


@cache
def decoder(sizes: DecoderSizes) -> Model:
    """Cuts into stages are those of Megatron-LM: as many blocks in each."""
    return Model(
        name=f"{sizes.layers} x {sizes.hidden}",
        sequence=sizes.sequence,
        kinds=(
            _piece(_inputs(sizes), sizes),
            _piece(_block(sizes), sizes, block=True),
            _piece(_outputs(sizes), sizes, losses=1),
        ),
        row=(0, *(1 for _ in range(sizes.layers)), 2),
        cuts={count: _cuts(sizes.layers, count) for count in range(1, sizes.layers + 1)},
    )


def _cuts(layers: int, count: int) -> tuple[int, ...]:
    """Where stages end. Where blocks do not divide, embedding and head count as one each; else the middle has more."""
    if layers % count and (layers + 2) % count == 0:
        each = (layers + 2) // count
        return tuple(each * (stage + 1) for stage in range(count))
    ends = [1 + round(layers * (stage + 1) / count) for stage in range(count)]
    return (*ends[:-1], layers + 2)


def _piece(layers: list[LayerSpec], sizes: DecoderSizes, losses: int = 0, block: bool = False) -> Piece:
    handed = StageOutput(numbers=sizes.hidden, side="x", always=False)
    return Piece(layers=tuple(layers), outputs=(handed,), losses=losses, block=block)


def _inputs(sizes: DecoderSizes) -> list[LayerSpec]:
    found: list[LayerSpec] = [EmbeddingSpec(name="embed", entries=sizes.vocabulary, features=sizes.hidden)]
    if not sizes.rotary:
        found.append(TableSpec(name="positions", entries=sizes.sequence, features=sizes.hidden))
    return found


def _norm(name: str, sizes: DecoderSizes) -> NormSpec:
    return NormSpec(name=name, features=sizes.hidden, centred=not sizes.gated, bias=not sizes.gated)


def _block(sizes: DecoderSizes) -> list[LayerSpec]:
    hidden, each, bias = sizes.hidden, sizes.head_dim, not sizes.gated
    queries = sizes.heads // sizes.kv_heads
    shared = queries > 1
    features = (sizes.heads * each, sizes.kv_heads * each, sizes.kv_heads * each)
    wide = 2 * sizes.mlp if sizes.gated else sizes.mlp
    return [
        _norm("norm1", sizes),
        LinearSpec(
            name="attention.qkv", k=hidden, n=sum(features), side="x", bias=bias, heads=sizes.kv_heads,
            always_out=True, queries=queries if shared else None, sections=features if shared else (),
        ),
        AttentionSpec(
            name="attention.core", heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=each, head_axis="y",
            rotary=sizes.rotary, causal=True,
        ),
        LinearSpec(
            name="attention.proj", k=sizes.heads * each, n=hidden, side="y", bias=bias, heads=sizes.kv_heads,
            always_in=True, queries=queries if shared else None,
        ),
        _norm("norm2", sizes),
        LinearSpec(
            name="mlp.gate_up" if sizes.gated else "mlp.up", k=hidden, n=wide, side="x", bias=bias,
            sections=(sizes.mlp, sizes.mlp) if sizes.gated else (),
        ),
        PointwiseSpec(
            name="mlp.act", side="y", inputs=wide, outputs=sizes.mlp, kept=wide + sizes.mlp if sizes.gated else wide
        ),
        LinearSpec(name="mlp.down", k=sizes.mlp, n=hidden, side="y", bias=bias),
    ]  # fmt: skip


def _outputs(sizes: DecoderSizes) -> list[LayerSpec]:
    return [
        _norm("norm", sizes),
        LinearSpec(
            name="head", k=sizes.hidden, n=sizes.vocabulary, side="x", bias=False,
            shares="embed" if sizes.tied else None, always_out=True, padded=True, with_loss=True,
        ),
        LossSpec(name="loss", whole=False, head="head", classes=sizes.vocabulary),
    ]  # fmt: skip
