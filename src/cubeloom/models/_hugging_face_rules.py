"""Tables of rules that say which Hugging Face tensors form each of ours: one rule per parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.models.configs import BERTConfig, Config, GPTConfig, LlamaConfig, ResNetConfig, Shape, UNetConfig


@dataclass(frozen=True)
class Layout:
    """How tensors form one of ours, and back: interleaved along their first dimension, each giving rows to each group
    in turn.

    With two groups and shares 2, 1, 1 a tensor of four rows and two of two, `q k v`, become `q0 q1 k0 v0 q2 q3 k1 v1`.
    One group and one share, the default, is the tensor itself.
    """

    groups: int = 1
    shares: tuple[int, ...] = (1,)
    transposed: bool = False  # GPT-2's weights are `[in, out]`, because its first implementation used convolutions
    fused: bool = False  # theirs is one tensor already, with its parts concatenated
    dim: int = 0  # instead of the first dimension

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        parts = [(part.T if self.transposed else part).movedim(self.dim, 0) for part in theirs]
        if self.fused:
            parts = unweave(parts[0], 1, self.shares)
        return weave(parts, self.groups).movedim(0, self.dim)

    def split(self, ours: Tensor) -> list[Tensor]:
        parts = unweave(ours.movedim(self.dim, 0), self.groups, self.shares)
        if self.fused:
            parts = [weave(parts, 1)]
        moved = [part.movedim(0, self.dim) for part in parts]
        return [(part.T if self.transposed else part).contiguous() for part in moved]


def weave(parts: Sequence[Tensor], groups: int) -> Tensor:
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def unweave(whole: Tensor, groups: int, shares: tuple[int, ...]) -> list[Tensor]:
    grouped = whole.unflatten(0, (groups, -1))  # [groups, rows of a group, ...]
    unit = grouped.shape[1] // sum(shares)
    return [part.flatten(0, 1) for part in grouped.split([unit * share for share in shares], dim=1)]


AS_IT_IS = Layout()


@dataclass(frozen=True)
class Rule:
    ours: str
    theirs: tuple[str, ...]
    layout: Layout = AS_IT_IS


@dataclass(frozen=True)
class Table:
    """The rules of one model.

    `our_copies` and `their_copies`: second names of tied weights. Either name may be missing in what is read; both are
    written. `unused`: suffixes of names of tensors that are not learned and are skipped. `prefix` may be missing from
    all the names that start with it.
    """

    rules: tuple[Rule, ...]
    our_copies: dict[str, str] = field(default_factory=dict)
    their_copies: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    prefix: str = ""


def weight(ours: str, *theirs: str, layout: Layout = AS_IT_IS) -> Iterator[Rule]:
    yield Rule(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), layout)


def both(ours: str, *theirs: str, layout: Layout = AS_IT_IS) -> Iterator[Rule]:
    """The rules of a weight and of its bias, which is never transposed."""
    yield from weight(ours, *theirs, layout=layout)
    flat = Layout(groups=layout.groups, shares=layout.shares, fused=layout.fused)
    yield Rule(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), flat)


def gpt(config: GPTConfig) -> Table:
    rules = [*weight("embed", "transformer.wte"), *weight("positions", "transformer.wpe")]
    matrix = Layout(transposed=True)
    qkv = Layout(groups=config.heads, shares=(1, 1, 1), transposed=True, fused=True)
    for n in range(config.layers):
        our, their = f"blocks.{n}", f"transformer.h.{n}"
        rules += both(f"{our}.norm1", f"{their}.ln_1")
        rules += both(f"{our}.attention.qkv", f"{their}.attn.c_attn", layout=qkv)
        rules += both(f"{our}.attention.proj", f"{their}.attn.c_proj", layout=matrix)
        rules += both(f"{our}.norm2", f"{their}.ln_2")
        rules += both(f"{our}.mlp.up", f"{their}.mlp.c_fc", layout=matrix)
        rules += both(f"{our}.mlp.down", f"{their}.mlp.c_proj", layout=matrix)
    rules += both("norm", "transformer.ln_f")
    unused = (".attn.bias", ".attn.masked_bias")  # causal masks that older versions stored
    if not config.tied:
        return Table((*rules, *weight("head", "lm_head")), prefix="transformer.", unused=unused)
    return Table(
        tuple(rules),
        prefix="transformer.",
        our_copies={"head.weight": "embed.weight"},
        their_copies={"lm_head.weight": "transformer.wte.weight"},
        unused=unused,
    )


def llama(config: LlamaConfig) -> Table:
    rules = [*weight("embed", "model.embed_tokens")]
    qkv, gate_up = Layout(shares=(config.queries_per_key, 1, 1)), Layout(shares=(1, 1))  # concatenated
    for n in range(config.layers):
        our, their = f"blocks.{n}", f"model.layers.{n}"
        heads = (f"{their}.self_attn.{name}_proj" for name in "qkv")
        rules += weight(f"{our}.norm1", f"{their}.input_layernorm")
        rules += weight(f"{our}.attention.qkv", *heads, layout=qkv)
        rules += weight(f"{our}.attention.proj", f"{their}.self_attn.o_proj")
        rules += weight(f"{our}.norm2", f"{their}.post_attention_layernorm")
        rules += weight(f"{our}.mlp.gate_up", f"{their}.mlp.gate_proj", f"{their}.mlp.up_proj", layout=gate_up)
        rules += weight(f"{our}.mlp.down", f"{their}.mlp.down_proj")
    rules += weight("norm", "model.norm")
    unused = ("rotary_emb.inv_freq",)
    if not config.tied:
        return Table((*rules, *weight("head", "lm_head")), unused=unused)
    return Table(
        tuple(rules),
        our_copies={"head.weight": "embed.weight"},
        their_copies={"lm_head.weight": "model.embed_tokens.weight"},
        unused=unused,
    )


def bert(config: BERTConfig) -> Table:
    rules = [
        *weight("embed", "bert.embeddings.word_embeddings"),
        *weight("positions", "bert.embeddings.position_embeddings"),
        *weight("types", "bert.embeddings.token_type_embeddings"),
        *both("embed_norm", "bert.embeddings.LayerNorm"),
    ]
    qkv = Layout(groups=config.heads, shares=(1, 1, 1))
    for n in range(config.layers):
        our, their = f"blocks.{n}", f"bert.encoder.layer.{n}"
        heads = (f"{their}.attention.self.{name}" for name in ("query", "key", "value"))
        rules += both(f"{our}.attention.qkv", *heads, layout=qkv)
        rules += both(f"{our}.attention.proj", f"{their}.attention.output.dense")
        rules += both(f"{our}.norm1", f"{their}.attention.output.LayerNorm")
        rules += both(f"{our}.mlp.up", f"{their}.intermediate.dense")
        rules += both(f"{our}.mlp.down", f"{their}.output.dense")
        rules += both(f"{our}.norm2", f"{their}.output.LayerNorm")
    rules += both("transform", "cls.predictions.transform.dense")
    rules += both("transform_norm", "cls.predictions.transform.LayerNorm")
    rules.append(Rule("decoder.bias", ("cls.predictions.decoder.bias",)))
    if config.next_sentence:
        rules += [*both("pooler", "bert.pooler.dense"), *both("next_sentence", "cls.seq_relationship")]
    bias = {"cls.predictions.bias": "cls.predictions.decoder.bias"}
    unused = ("embeddings.position_ids",)
    if not config.tied:
        # Hugging Face then unties the two biases as well, and uses only the decoder's.
        return Table((*rules, *weight("decoder", "cls.predictions.decoder")), {}, bias, (*unused, *bias))
    return Table(
        tuple(rules),
        our_copies={"decoder.weight": "embed.weight"},
        their_copies={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight", **bias},
        unused=unused,
    )


def unet(config: UNetConfig) -> Table:
    rules = [
        *both("time.first", "time_embedding.linear_1"),
        *both("time.second", "time_embedding.linear_2"),
        *both("conv_in", "conv_in"),
    ]
    for ours, theirs, their_kind in (("down", "down_blocks", "downsamplers"), ("up", "up_blocks", "upsamplers")):
        level = block = 0
        for number, shape in enumerate(config.down() if ours == "down" else config.up()):
            if shape.resamples:
                rules += both(f"{ours}.{number}.conv", f"{theirs}.{level}.{their_kind}.0.conv")
                level, block = level + 1, 0
            else:
                rules += _unet_block(config, shape, f"{ours}.{number}", f"{theirs}.{level}", block)
                block += 1
    for number, shape in enumerate(config.middle()):
        rules += _unet_block(config, shape, f"middle.{number}", "mid_block", number)
    return Table((*rules, *both("norm_out", "conv_norm_out"), *both("conv_out", "conv_out")))


def _unet_block(config: UNetConfig, shape: Shape, ours: str, theirs: str, number: int) -> Iterator[Rule]:
    res = f"{theirs}.resnets.{number}"
    joined = _in_turns(config, shape)
    yield from both(f"{ours}.res.norm1", f"{res}.norm1", layout=joined)
    inputs = replace(joined, dim=1) if shape.skip else AS_IT_IS  # a convolution's weight is [out, in, ...]
    yield from weight(f"{ours}.res.conv1", f"{res}.conv1", layout=inputs)
    yield Rule(f"{ours}.res.conv1.bias", (f"{res}.conv1.bias",))
    for name in ("norm2", "conv2"):
        yield from both(f"{ours}.res.{name}", f"{res}.{name}")
    yield from both(f"{ours}.res.time_proj", f"{res}.time_emb_proj")
    if shape.inputs != shape.outputs:
        yield from weight(f"{ours}.res.skip", f"{res}.conv_shortcut", layout=inputs)
        yield Rule(f"{ours}.res.skip.bias", (f"{res}.conv_shortcut.bias",))
    if shape.attention:
        attention = f"{theirs}.attentions.{number}"
        qkv = Layout(groups=shape.outputs // (config.head_dim or shape.outputs), shares=(1, 1, 1))
        yield from both(f"{ours}.attention.norm", f"{attention}.group_norm")
        yield from both(f"{ours}.attention.qkv", *(f"{attention}.to_{name}" for name in "qkv"), layout=qkv)
        yield from both(f"{ours}.attention.proj", f"{attention}.to_out.0")


def _in_turns(config: UNetConfig, shape: Shape) -> Layout:
    """Theirs are the channels of the upward path followed by those of the skip connection."""
    if not shape.skip:
        return AS_IT_IS
    first = shape.inputs - shape.skip
    unit = gcd(first, shape.skip)
    return Layout(groups=config.turns, shares=(first // unit, shape.skip // unit), fused=True)


def table(config: Config) -> Table:
    match config:
        case GPTConfig():
            return gpt(config)
        case LlamaConfig():
            return llama(config)
        case BERTConfig():
            return bert(config)
        case UNetConfig():
            return unet(config)
        case ResNetConfig():
            raise UserError("weights of a ResNet cannot be read from Hugging Face's, or written as theirs")
