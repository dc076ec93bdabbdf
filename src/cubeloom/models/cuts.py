"""How each model lies on the cube. A model knows nothing of this; a cut knows only its module names."""

from __future__ import annotations

from torch import nn

from cubeloom.cube.cut import (
    Contract,
    Cut,
    Dropout,
    Embedding,
    Expand,
    FirstToken,
    Kind,
    Loss,
    Norm,
    Table,
    Whole,
)
from cubeloom.models.bert import BERT, BERTConfig
from cubeloom.models.gpt import GPT, GPTConfig
from cubeloom.models.llama import Llama, LlamaConfig


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
        "blocks.*.mlp.up": Expand(),
        "blocks.*.mlp.down": Contract(),
        "blocks.*.mlp.dropout": Dropout(),
        "norm": Norm(),
        "head": Expand(sharded_output=True),
        "loss": Loss(),
    }


def llama_cut(config: LlamaConfig) -> Cut:
    return {
        "embed": Embedding(),
        "blocks.*.norm1": Norm(),
        # A key with the queries that share it is what must stay together.
        "blocks.*.attention.qkv": Expand(heads=config.kv_heads),
        "blocks.*.attention.proj": Contract(heads=config.kv_heads),
        "blocks.*.norm2": Norm(),
        "blocks.*.mlp.gate_up": Expand(),
        "blocks.*.mlp.down": Contract(),
        "norm": Norm(),
        "head": Expand(sharded_output=True),
        "loss": Loss(),
    }


def bert_cut(config: BERTConfig) -> Cut:
    cut: dict[str, Kind] = {
        "embed": Embedding(),
        "positions": Table(),
        "types": Table(),
        "embed_norm": Norm(),
        "dropout": Dropout(),
        "blocks.*.attention.qkv": Expand(heads=config.heads),
        "blocks.*.attention.proj": Contract(heads=config.heads),
        "blocks.*.attention.dropout": Dropout(),
        "blocks.*.norm1": Norm(),
        "blocks.*.mlp.up": Expand(),
        "blocks.*.mlp.down": Contract(),
        "blocks.*.mlp.dropout": Dropout(),
        "blocks.*.norm2": Norm(),
        # One linear stands between the last block and the decoder, whose weight is the embedding's: turned back.
        "transform": Expand(turn=True),
        "transform_norm": Norm(sharded=True),
        "decoder": Expand(sharded_input=True, sharded_output=True),
        "loss": Loss(),
    }
    if config.next_sentence:
        cut |= {
            "first": FirstToken(config.hidden),
            "pooler": Whole(),
            "next_sentence": Whole(),
            "next_sentence_loss": Loss(whole=True),
        }
    return cut


def cut_of(model: nn.Module) -> Cut:
    """The cut of a model of ours."""
    match model:
        case GPT():
            return gpt_cut(model.config)
        case Llama():
            return llama_cut(model.config)
        case BERT():
            return bert_cut(model.config)
    raise TypeError(f"no cut is written for {type(model).__name__}")
