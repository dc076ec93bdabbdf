"""Creates the module of a configuration."""

from __future__ import annotations

from typing import overload

from cubeloom.models.bert import BERT
from cubeloom.models.configs import (
    BERTConfig,
    Config,
    GPTConfig,
    LanguageConfig,
    LlamaConfig,
    ResNetConfig,
    UNetConfig,
)
from cubeloom.models.gpt import GPT
from cubeloom.models.llama import Llama
from cubeloom.models.presets import config
from cubeloom.models.resnet import ResNet
from cubeloom.models.unet import UNet

LanguageModel = GPT | Llama | BERT
Model = LanguageModel | UNet | ResNet


@overload
def build(model: LanguageConfig) -> LanguageModel: ...


@overload
def build(model: str | Config) -> Model: ...


def build(model: str | Config) -> Model:
    """The model on the default device. `initial` determines its values: those that torch drew here are not used."""
    match config(model) if isinstance(model, str) else model:
        case GPTConfig() as gpt:
            return GPT(gpt)
        case LlamaConfig() as llama:
            return Llama(llama)
        case BERTConfig() as bert:
            return BERT(bert)
        case UNetConfig() as unet:
            return UNet(unet)
        case ResNetConfig() as resnet:
            return ResNet(resnet)
