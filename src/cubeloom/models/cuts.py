"""The cuts of our models. A model does not know its cut; a cut only knows the model's module names."""

from __future__ import annotations

from torch import nn

from cubeloom.models.bert import BERT
from cubeloom.models.configs import BERTConfig, GPTConfig, LlamaConfig, ResNetConfig, Shape, UNetConfig
from cubeloom.models.gpt import GPT
from cubeloom.models.llama import Llama
from cubeloom.models.resnet import ResNet
from cubeloom.models.unet import UNet
from cubeloom.parallel.layers import (
    Attention,
    ColwiseFromReplicated,
    Concat,
    Contract,
    CopyToRegion,
    Cut,
    Declared,
    Dropout,
    Embedding,
    Expand,
    FeedForward,
    FirstToken,
    Loss,
    Norm,
    Replicated,
    RowwiseScatter,
    RowwiseToReplicated,
    SquaredLoss,
    Table,
)
from cubeloom.parallel.specs import Side, other


def gpt_cut(config: GPTConfig) -> Cut:
    return {
        "embed": Embedding(),
        "positions": Table(),
        "dropout": Dropout(),
        "blocks.*.norm1": Norm(),
        "blocks.*.attention.qkv": Expand(heads=config.heads),
        "blocks.*.attention.proj": Contract(heads=config.heads),
        "blocks.*.attention.dropout": Dropout(),
        "blocks.*.norm2": Norm(),
        "blocks.*.mlp": FeedForward(),
        "blocks.*.mlp.up": Expand(),
        "blocks.*.mlp.down": Contract(),
        "blocks.*.mlp.dropout": Dropout(),
        "norm": Norm(),
        "head": Expand(sharded_output=True),
        "loss": Loss(head="head"),
    }


def llama_cut(config: LlamaConfig) -> Cut:
    return {
        "embed": Embedding(),
        "blocks.*.norm1": Norm(),
        # All queries, all keys and all values. A rank has some keys, their values and the queries that share them.
        "blocks.*.attention.qkv": Expand(heads=config.kv_heads, queries=config.queries_per_key),
        "blocks.*.attention.core": Attention(config.kv_heads, config.queries_per_key),
        "blocks.*.attention.proj": Contract(heads=config.kv_heads, queries=config.queries_per_key),
        "blocks.*.norm2": Norm(),
        "blocks.*.mlp.gate_up": Expand(sections=2 * (config.mlp_hidden,)),
        "blocks.*.mlp.down": Contract(),
        "norm": Norm(),
        "head": Expand(sharded_output=True),
        "loss": Loss(head="head"),
    }


def bert_cut(config: BERTConfig) -> Cut:
    cut: dict[str, Declared] = {
        "embed": Embedding(),
        "positions": Table(),
        "types": Table(),
        "embed_norm": Norm(),
        "dropout": Dropout(),
        "blocks.*.attention.qkv": Expand(heads=config.heads),
        "blocks.*.attention.proj": Contract(heads=config.heads),
        "blocks.*.attention.dropout": Dropout(),
        "blocks.*.norm1": Norm(),
        "blocks.*.mlp": FeedForward(),
        "blocks.*.mlp.up": Expand(),
        "blocks.*.mlp.down": Contract(),
        "blocks.*.mlp.dropout": Dropout(),
        "blocks.*.norm2": Norm(),
        # One linear is between the last block and the decoder, whose weight is the embedding's: it is turned back.
        "transform": Expand(turn=True),
        "transform_norm": Norm(sharded=True),
        "decoder": Expand(sharded_input=True, sharded_output=True),
        "loss": Loss(head="decoder"),
    }
    if config.next_sentence:
        cut |= {
            "first": FirstToken(config.hidden),
            "pooler": Replicated(),
            "next_sentence": Replicated(),
            "next_sentence_loss": Loss(whole=True),
        }
    return cut


def unet_cut(config: UNetConfig) -> Cut:
    """Every convolution moves features to the other side. A level keeps its side, and a resampling changes it.

    Skip connections join blocks of one resolution, so both ends are on the same side and nothing is redistributed.
    """
    time = 4 * config.widths[0]
    cut: dict[str, Declared] = {
        "time.first": Replicated(),
        "time.second": Replicated(),
        "time.act_out": CopyToRegion(time),  # every res block uses all of it
        "conv_in": ColwiseFromReplicated("x"),
        "norm_out": Norm(side="x"),
        "conv_out": RowwiseToReplicated("x"),
        "loss": SquaredLoss("x"),
    }
    side: Side = "x"
    for part, shapes in (("down", config.down()), ("middle", config.middle()), ("up", config.up())):
        for number, shape in enumerate(shapes):
            if shape.resamples:
                cut[f"{part}.{number}.conv"] = _away(side)
                side = other(side)
            else:
                block = _unet_block(shape, side, shape.outputs // (config.head_dim or shape.outputs), config.turns)
                cut |= {f"{part}.{number}.{name}": kind for name, kind in block.items()}
    return cut


def _unet_block(shape: Shape, side: Side, heads: int, turns: int) -> dict[str, Declared]:
    joined = (shape.inputs - shape.skip, shape.skip, turns) if shape.skip else None
    cut: dict[str, Declared] = {
        "res.norm1": Norm(side=side, joined=joined),
        "res.conv1": _away(side),
        "res.time_proj": ColwiseFromReplicated(other(side)),
        "res.norm2": Norm(side=other(side)),
        "res.conv2": _back(side),
    }
    if shape.skip:
        cut["concat"] = Concat(side, turns=turns)
    if shape.inputs != shape.outputs:
        cut["res.skip"] = RowwiseScatter(side)
    if shape.attention:
        cut |= {
            "attention.norm": Norm(side=side),
            "attention.qkv": _away(side, heads),
            "attention.proj": _back(side, heads),
        }
    return cut


def _away(side: Side, heads: int | None = None) -> Declared:
    """From the stream's side to the other side."""
    return Expand(heads=heads, stream=side) if side == "x" else Contract(heads=heads, stream=side)


def _back(side: Side, heads: int | None = None) -> Declared:
    return Contract(heads=heads, stream=side) if side == "x" else Expand(heads=heads, stream=side)


def resnet_cut(config: ResNetConfig) -> Cut:
    return {
        "conv_in": ColwiseFromReplicated(),
        "norm_in": Norm(),
        "blocks.*.conv1": Expand(),
        "blocks.*.bn1": Norm(side="y"),
        "blocks.*.conv2": Contract(),
        "blocks.*.bn2": Norm(),
        "blocks.*.skip": RowwiseScatter(),
        "blocks.*.skip_norm": Norm(),
        "head": Expand(sharded_output=True),
        "loss": Loss(head="head"),
    }


def cut_of(model: nn.Module) -> Cut:
    """The cut of one of our models."""
    match model:
        case GPT():
            return gpt_cut(model.config)
        case Llama():
            return llama_cut(model.config)
        case BERT():
            return bert_cut(model.config)
        case UNet():
            return unet_cut(model.config)
        case ResNet():
            return resnet_cut(model.config)
    raise TypeError(f"no cut is written for {type(model).__name__}")
