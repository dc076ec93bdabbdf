"""Models by name, from those that train on a laptop in seconds to the papers' sizes. Does not import torch."""

from __future__ import annotations

from cubeloom.base.registry import Registry
from cubeloom.models.configs import BERTConfig, Config, GPTConfig, LlamaConfig, ResNetConfig, UNetConfig


def _gpt2(layers: int, hidden: int, heads: int, *, tied: bool = True) -> GPTConfig:
    return GPTConfig(vocab=50257, positions=1024, hidden=hidden, layers=layers, heads=heads, tied=tied)


def _gpt(layers: int, hidden: int, heads: int) -> GPTConfig:
    """A shape from the launch scripts of Tensor3D's authors. 51200 is GPT-2's vocabulary, padded so that it divides."""
    return GPTConfig(vocab=51200, positions=2048, hidden=hidden, layers=layers, heads=heads)


def _llama2(layers: int, hidden: int, heads: int, kv_heads: int, mlp_hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab=32000,
        positions=4096,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        mlp_hidden=mlp_hidden,
        norm_eps=1e-5,
    )


def _bert(layers: int, hidden: int, heads: int) -> BERTConfig:
    return BERTConfig(vocab=30522, positions=512, hidden=hidden, layers=layers, heads=heads)


def _unet(channels: int) -> UNetConfig:
    """A shape of Tensor3D's: 32 pixels, four levels, three res blocks each; attention as in improved-diffusion.

    The authors' scripts give the channels for 550M to 8B parameters, in improved-diffusion's model, which takes two
    numbers per channel from the time where this one takes one. The channels of the paper's own sizes, 3.5B to 28B, are
    in no script: here they are the nearest multiple of 32. Heads have 64 channels, so that there are many to cut.
    """
    return UNetConfig(
        image=32,
        channels=channels,
        multipliers=(1, 2, 2, 2),
        attention=(False, True, True, False),
        res_blocks=3,
        head_dim=64,
        turns=32,
    )


_PRESETS: dict[str, Config] = {
    # Small enough for tests, with sizes that 2, 3, 4, 6 and 8 and the products of small grids divide.
    "gpt-tiny": GPTConfig(vocab=384, positions=64, hidden=96, layers=2, heads=24),
    "llama-tiny": LlamaConfig(vocab=384, positions=64, hidden=96, layers=2, heads=48, kv_heads=24, mlp_hidden=192),
    "bert-tiny": BERTConfig(vocab=384, positions=64, hidden=96, layers=2, heads=24),
    "unet-tiny": UNetConfig(
        image=16,
        channels=24,
        multipliers=(1, 2, 2),
        attention=(False, True, False),
        res_blocks=1,
        head_dim=2,
        groups=4,
        turns=24,
    ),
    "resnet-tiny": ResNetConfig(blocks=(1, 1, 1), classes=24, image=16, width=24, small_images=True),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-64": _gpt2(64, 1280, 20, tied=False),  # Chimera's, table 4: 1,389,327,360 parameters
    "gpt-5b": _gpt(24, 4096, 32),
    "gpt-10b": _gpt(32, 5120, 40),
    "gpt-20b": _gpt(32, 7168, 56),
    "gpt-40b": _gpt(38, 9216, 72),
    "gpt-50b": _gpt(48, 9216, 72),
    "gpt-60b": _gpt(56, 9216, 72),
    "gpt-80b": _gpt(42, 12288, 96),
    "gpt-100b": _gpt(53, 12288, 96),
    "gpt-160b": _gpt(84, 12288, 96),
    "gpt-175b": _gpt(96, 12288, 96),
    "llama-7b": _llama2(32, 4096, 32, 32, 11008),
    "llama-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama-70b": _llama2(80, 8192, 64, 8, 28672),
    "llama3-8b": LlamaConfig(
        vocab=128256,
        positions=8192,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        mlp_hidden=14336,
        rotary_base=500000.0,
        norm_eps=1e-5,
    ),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    # Chimera's, table 4: 669,790,012 parameters
    "bert-48": BERTConfig(vocab=30522, positions=512, hidden=1024, layers=48, heads=16, tied=False, next_sentence=True),
    "unet-small": UNetConfig(
        image=32,
        channels=64,
        multipliers=(1, 2, 2, 2),
        attention=(False, True, False, False),
        res_blocks=2,
        head_dim=16,
    ),
    # DDPM's for CIFAR-10, whose weights are published: 35,746,307 parameters
    "unet-cifar10": UNetConfig(
        image=32,
        channels=128,
        multipliers=(1, 2, 2, 2),
        attention=(False, True, False, False),
        res_blocks=2,
        norm_eps=1e-6,
        cosine_first=False,
        frequency_shift=1,
        pad_after=True,
    ),
    "unet-550m": _unet(416),
    "unet-1b": _unet(576),
    "unet-2b": _unet(800),
    "unet-3.5b": _unet(1088),
    "unet-4b": _unet(1120),
    "unet-7.5b": _unet(1568),
    "unet-8b": _unet(1600),
    "unet-14b": _unet(2176),
    "unet-28b": _unet(3072),
    "resnet-18": ResNetConfig(blocks=(2, 2, 2, 2), classes=1000),
    "resnet-34": ResNetConfig(blocks=(3, 4, 6, 3), classes=1000),
    "wideresnet-34-2": ResNetConfig(blocks=(3, 4, 6, 3), classes=1000, widen=2),
}


PRESETS: Registry[Config] = Registry("model", _PRESETS)


def names() -> tuple[str, ...]:
    return tuple(PRESETS)


def config(name: str) -> Config:
    return PRESETS.find(name)
