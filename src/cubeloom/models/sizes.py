"""Counts the parameters of a configuration without creating its layers. Does not import torch."""

from __future__ import annotations

from cubeloom.models.configs import BERTConfig, Config, GPTConfig, LlamaConfig, ResNetConfig, Shape, UNetConfig


def parameters(config: Config) -> int:
    """Of the module that `build` creates; a tied weight counts once."""
    match config:
        case GPTConfig(hidden=hidden, vocab=vocab):
            tables = (vocab + config.positions) * hidden + (0 if config.tied else vocab * hidden)
            return tables + config.layers * _block(hidden) + _norm(hidden)
        case LlamaConfig(hidden=hidden, vocab=vocab):
            kv = 2 * config.kv_heads * config.head_dim
            block = (2 * hidden + kv) * hidden + 3 * hidden * config.mlp_hidden + 2 * hidden
            return vocab * hidden * (1 if config.tied else 2) + config.layers * block + hidden
        case BERTConfig(hidden=hidden, vocab=vocab):
            tables = (vocab + config.positions + config.types) * hidden + (0 if config.tied else vocab * hidden)
            ends = 2 * _norm(hidden) + _linear(hidden, hidden) + vocab
            more = _linear(hidden, hidden) + _linear(hidden, 2) if config.next_sentence else 0
            return tables + config.layers * _block(hidden) + ends + more
        case ResNetConfig():
            return _resnet(config)
        case UNetConfig():
            return _unet(config)


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def _norm(features: int) -> int:
    return 2 * features


def _conv(inputs: int, outputs: int, kernel: int) -> int:
    return (inputs * kernel**2 + 1) * outputs


def _block(hidden: int) -> int:
    """Of a GPT or BERT block: attention, an MLP of four times the width, two norms."""
    attention = _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    return attention + _linear(hidden, 4 * hidden) + _linear(4 * hidden, hidden) + 2 * _norm(hidden)


def _resnet(config: ResNetConfig) -> int:
    found = config.channels * config.width * (9 if config.small_images else 49) + _norm(config.width)
    before = config.width
    for stage, (width, blocks) in enumerate(zip(config.widths, config.blocks, strict=True)):
        for number in range(blocks):
            found += 9 * (before + width) * width + 2 * _norm(width)
            if before != width or (stage and number == 0):
                found += before * width + _norm(width)
            before = width
    return found + _linear(before, config.classes)


def _unet(config: UNetConfig) -> int:
    width = config.widths[0]
    time = _linear(width, 4 * width) + _linear(4 * width, 4 * width)
    ends = _conv(config.in_channels, width, 3) + _norm(width) + _conv(width, config.out_channels, 3)
    return time + ends + sum(_unet_block(shape, width) for shape in (*config.down(), *config.middle(), *config.up()))


def _unet_block(shape: Shape, width: int) -> int:
    inputs, outputs = shape.inputs, shape.outputs
    if shape.resamples:
        return _conv(outputs, outputs, 3)
    found = _norm(inputs) + _conv(inputs, outputs, 3) + _norm(outputs) + _conv(outputs, outputs, 3)
    found += _linear(4 * width, outputs) + (0 if inputs == outputs else _conv(inputs, outputs, 1))
    attention = _norm(outputs) + _linear(outputs, 3 * outputs) + _linear(outputs, outputs)
    return found + (attention if shape.attention else 0)
