"""The configurations of our models: their sizes, and their divisibility rules. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from cubeloom.base.divisors import divisors
from cubeloom.base.errors import UserError


def check_divides(whole: str, size: int, parts: str, count: int) -> None:
    if size % count:
        nearest = sorted(sorted(divisors(size), key=lambda n: abs(n - count))[:2])
        raise UserError(
            f"{count} {parts} do not divide the {whole} {size}; the nearest that do: {' or '.join(map(str, nearest))}"
        )


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocab: int
    positions: int
    hidden: int
    layers: int
    heads: int
    tied: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-5
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_divides("hidden size", self.hidden, "heads", self.heads)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab: int
    positions: int  # the longest sequence; rotary positions have no table that would limit it
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


@dataclass(frozen=True, kw_only=True)
class BERTConfig:
    vocab: int
    positions: int
    hidden: int
    layers: int
    heads: int
    types: int = 2
    tied: bool = True
    next_sentence: bool = False
    dropout: float = 0.0
    norm_eps: float = 1e-12
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_divides("hidden size", self.hidden, "heads", self.heads)


@dataclass(frozen=True)
class Shape:
    """The input and output channels of one block of the U-Net."""

    inputs: int
    outputs: int
    skip: int = 0  # the number of input channels, the last ones, from a skip connection
    attention: bool = False
    resamples: bool = False  # changes only the resolution


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """Level n has `channels * multipliers[n]` channels, and each next level half the resolution."""

    image: int  # height and width
    channels: int
    multipliers: tuple[int, ...]
    attention: tuple[bool, ...]  # the levels with attention between pixels
    res_blocks: int  # per level on the way down; one more on the way up
    in_channels: int = 3
    out_channels: int = 3
    head_dim: int | None = None  # by default all channels are one head
    groups: int = 32  # of a norm
    middle_attention: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-5
    cosine_first: bool = True  # in the sinusoids of a time
    frequency_shift: int = 0  # 1: the slowest sinusoid has a period of exactly 2 pi 10000 steps
    pad_after: bool = False  # downsampling pads only below and to the right, as in the first DDPM
    turns: int = 8  # interleaving of channels joined over a skip connection: a grid's x and y must divide it
    steps: int = 1000  # from an image to noise
    betas: tuple[float, float] = (1e-4, 0.02)  # the noise added by the first and the last step

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.multipliers):
            raise UserError(
                f"attention is given for {len(self.attention)} levels, but multipliers for {len(self.multipliers)}"
            )
        if self.image % 2 ** (len(self.multipliers) - 1):
            raise UserError(f"an image of {self.image} pixels cannot be halved {len(self.multipliers) - 1} times")
        check_divides("sinusoids of a time", self.widths[0], "parts, cosines and sines,", 2)
        for shape in (*self.down(), *self.middle(), *self.up()):
            check_divides("number of channels", shape.inputs, "groups", self.groups)
            check_divides("number of channels", shape.outputs, "groups", self.groups)
            if shape.skip:
                check_divides("number of channels", shape.skip, "turns", self.turns)
                check_divides("number of channels", shape.inputs - shape.skip, "turns", self.turns)
            if shape.attention and self.head_dim is not None:
                check_divides("number of channels", shape.outputs, "channels of a head", self.head_dim)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.channels * multiplier for multiplier in self.multipliers)

    def down(self) -> list[Shape]:
        found, before = [], self.widths[0]
        for level, width in enumerate(self.widths):
            for _ in range(self.res_blocks):
                found.append(Shape(before, width, attention=self.attention[level]))
                before = width
            if level < len(self.widths) - 1:
                found.append(Shape(width, width, resamples=True))
        return found

    def middle(self) -> list[Shape]:
        width = self.widths[-1]
        return [Shape(width, width, attention=self.middle_attention), Shape(width, width)]

    def up(self) -> list[Shape]:
        found, before = [], self.widths[-1]
        skips = [self.widths[0], *(shape.outputs for shape in self.down())]
        for level, width in reversed(list(enumerate(self.widths))):
            for _ in range(self.res_blocks + 1):
                skip = skips.pop()
                found.append(Shape(before + skip, width, skip, self.attention[level]))
                before = width
            if level > 0:
                found.append(Shape(width, width, resamples=True))
        return found


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Stage n has `width * widen * 2**n` channels; each stage but the first halves the resolution."""

    blocks: tuple[int, ...]  # per stage
    classes: int
    image: int = 224  # height and width for counting communication; any other size works too
    width: int = 64
    widen: int = 1
    channels: int = 3  # of the images
    small_images: bool = False  # of 32 pixels or less: without the two initial halvings
    norm_eps: float = 1e-5
    label_smoothing: float = 0.0

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.width * self.widen * 2**stage for stage in range(len(self.blocks)))


LanguageConfig = GPTConfig | LlamaConfig | BERTConfig
Config = LanguageConfig | UNetConfig | ResNetConfig
