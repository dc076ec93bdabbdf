"""The U-Net of denoising diffusion: predicts the noise from a noisy image and its noise level."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base.initial import Initial
from cubeloom.base.turns import interleave, order
from cubeloom.models.configs import Shape, UNetConfig
from cubeloom.models.layers import AttentionByHead, MeanSquaredError, fan_ins, initial_by_fan
from cubeloom.models.pieces import Carry, Piece


def sinusoids(times: Tensor, features: int, *, cosine_first: bool, shift: int) -> Tensor:
    """Times `[samples]` as sinusoids of many wavelengths, `[samples, features]`, always in float32."""
    half = features // 2
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=times.device) / (half - shift)
    angles = times[:, None].float() * exponents.exp()
    waves = (angles.cos(), angles.sin()) if cosine_first else (angles.sin(), angles.cos())
    return torch.cat(waves, dim=-1)


def noise_added(config: UNetConfig, device: torch.device | None = None) -> Tensor:
    """The variance of the noise that each step adds, `[steps]`: DDPM's betas, which grow linearly."""
    return torch.linspace(*config.betas, config.steps, dtype=torch.float64, device=device)


class Concat(nn.Module):
    """Interleaves the channels of `x` and of `skip`, so that a contiguous part of the result has a part of both."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return interleave(x, skip, self.turns)


class NormInTurns(nn.GroupNorm):
    """GroupNorm of interleaved channels, with the groups of the concatenated tensors, as in the literature."""

    def __init__(self, groups: int, first: int, second: int, turns: int, eps: float) -> None:
        super().__init__(groups, first + second, eps)
        self.joined = first, second, turns

    def forward(self, x: Tensor) -> Tensor:
        place = torch.tensor(order(*self.joined), device=x.device)  # each channel's position if concatenated
        grouped = functional.group_norm(x[:, place.argsort()], self.num_groups, eps=self.eps)
        return grouped[:, place] * self.weight[:, None, None] + self.bias[:, None, None]


class TimeEmbedding(nn.Module):
    """From times `[samples]` to `[samples, 4 * features]`, including the activation that every res block would start
    with.
    """

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.features = config.widths[0]
        self.cosine_first, self.shift = config.cosine_first, config.frequency_shift
        self.first = nn.Linear(self.features, 4 * self.features)
        self.act = nn.SiLU()
        self.second = nn.Linear(4 * self.features, 4 * self.features)
        self.act_out = nn.SiLU()

    def forward(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        waves = sinusoids(times, self.features, cosine_first=self.cosine_first, shift=self.shift)
        return self.act_out(self.second(self.act(self.first(waves.to(dtype)))))


class ResBlock(nn.Module):
    def __init__(self, config: UNetConfig, shape: Shape) -> None:
        super().__init__()
        self.norm1 = (
            NormInTurns(config.groups, shape.inputs - shape.skip, shape.skip, config.turns, config.norm_eps)
            if shape.skip
            else nn.GroupNorm(config.groups, shape.inputs, eps=config.norm_eps)
        )
        self.act = nn.SiLU()
        self.conv1 = nn.Conv2d(shape.inputs, shape.outputs, 3, padding=1)
        self.time_proj = nn.Linear(4 * config.widths[0], shape.outputs)
        self.norm2 = nn.GroupNorm(config.groups, shape.outputs, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.conv2 = nn.Conv2d(shape.outputs, shape.outputs, 3, padding=1)
        self.skip = nn.Conv2d(shape.inputs, shape.outputs, 1) if shape.inputs != shape.outputs else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.conv1(self.act(self.norm1(x))) + self.time_proj(time)[:, :, None, None]
        inner = self.conv2(self.dropout(self.act(self.norm2(inner))))
        return inner + (x if self.skip is None else self.skip(x))


class PixelAttention(nn.Module):
    def __init__(self, config: UNetConfig, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(config.groups, channels, eps=config.norm_eps)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.core = AttentionByHead(head_dim=config.head_dim or channels, causal=False)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        tokens = self.norm(x).flatten(2).transpose(1, 2)  # [samples, pixels, channels]
        mixed = self.core(self.qkv(tokens).flatten(0, 1), size.numel()).unflatten(0, (-1, size.numel()))
        return x + self.proj(mixed).transpose(1, 2).unflatten(2, size)


class Block(nn.Module):
    """A res block, with the skip connection's channels on the way up, and attention if the level has it."""

    def __init__(self, config: UNetConfig, shape: Shape) -> None:
        super().__init__()
        self.concat = Concat(config.turns) if shape.skip else None
        self.res = ResBlock(config, shape)
        self.attention = PixelAttention(config, shape.outputs) if shape.attention else None

    def forward(self, x: Tensor, time: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.concat is not None:
            x = self.concat(x, skip)
        x = self.res(x, time)
        return x if self.attention is None else self.attention(x)


class Downsample(nn.Module):
    def __init__(self, config: UNetConfig, channels: int) -> None:
        super().__init__()
        self.pad_after = config.pad_after
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=0 if config.pad_after else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.pad(x, (0, 1, 0, 1)) if self.pad_after else x)


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))


class UNet(nn.Module):
    """DDPM's U-Net as in diffusers' UNet2DModel. It runs piece by piece, so skip connections are wired in one place."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.widths[0]
        self.time = TimeEmbedding(config)
        self.conv_in = nn.Conv2d(config.in_channels, width, 3, padding=1)
        self.down = nn.ModuleList(
            Downsample(config, shape.outputs) if shape.resamples else Block(config, shape) for shape in config.down()
        )
        self.middle = nn.ModuleList(Block(config, shape) for shape in config.middle())
        self.up = nn.ModuleList(
            Upsample(shape.outputs) if shape.resamples else Block(config, shape) for shape in config.up()
        )
        self.norm_out = nn.GroupNorm(config.groups, width, eps=config.norm_eps)
        self.act = nn.SiLU()
        self.conv_out = nn.Conv2d(width, config.out_channels, 3, padding=1)
        self.loss = MeanSquaredError()
        self._fan_ins = fan_ins(self)

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The mean squared error of predicting the noise in images to which `times` steps of noise were added.

        Images `[samples, channels, height, width]` are between -1 and 1; noise is normal, of the same shape; times are
        `[samples]` integers below `steps`.
        """
        return self.loss(self.predict(self.mix(images, noise, times), times), noise)

    def predict(self, noisy: Tensor, times: Tensor) -> Tensor:
        carry = self.begin(noisy, times)
        for piece in self.block_pieces():
            carry = piece.run(carry, {})
        return self.end(carry)

    def mix(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        left = (1 - noise_added(self.config, times.device)).cumprod(0)[
            times, None, None, None
        ]  # of the image's variance
        return left.sqrt().to(images.dtype) * images + (1 - left).sqrt().to(images.dtype) * noise

    def begin(self, noisy: Tensor, times: Tensor) -> Carry:
        return {"time": self.time(times, noisy.dtype), "skip0": self.conv_in(noisy)}

    def end(self, carry: Carry) -> Tensor:
        return self.conv_out(self.act(self.norm_out(carry["x"])))

    def pieces(self) -> list[Piece]:
        return [
            Piece(
                ("time", "conv_in"),
                lambda _, data: self.begin(self.mix(data["images"], data["noise"], data["times"]), data["times"]),
                whole=frozenset({"time"}),
            ),
            *self.block_pieces(),
            Piece(
                ("norm_out", "act", "conv_out", "loss"),
                lambda carry, data: {"loss": self.loss(self.end(carry), data["noise"])},
                losses={"loss": "noise"},
            ),
        ]

    def block_pieces(self) -> list[Piece]:
        """The U itself. On the way down the last skip tensor is also the carried one; from the middle on that is `x`."""
        down, middle, up = self.config.down(), self.config.middle(), self.config.up()
        found = [
            self._piece(f"down.{number}", shape, f"skip{number}", f"skip{number + 1}")
            for number, shape in enumerate(down)
        ]
        last = len(down)
        for number, shape in enumerate(middle):
            found.append(self._piece(f"middle.{number}", shape, "x" if number else f"skip{last}", "x"))
        for number, shape in enumerate(up):
            skip = f"skip{last}" if shape.skip else None
            last -= shape.skip > 0
            # The last block sends only x, so that everything that is sent is used.
            used = (skip,) if number < len(up) - 1 else (skip, "time")
            found.append(self._piece(f"up.{number}", shape, "x", "x", skip, used))
        return found

    def _piece(
        self,
        name: str,
        shape: Shape,
        source: str,
        target: str,
        skip: str | None = None,
        used: tuple[str | None, ...] = (),
    ) -> Piece:
        def run(carry: Carry, _: object) -> Carry:
            layer = self.get_submodule(name)  # looked up when it runs, because a cut may have replaced its layers
            inputs = [carry[source]]
            if not shape.resamples:
                inputs += [carry["time"]] if skip is None else [carry["time"], carry[skip]]
            kept = {key: tensor for key, tensor in carry.items() if key not in used}
            return {**kept, target: layer(*inputs)}

        return Piece((name,), run)

    def example(self, samples: int) -> dict[str, Tensor]:
        """Inputs without values, to learn all shapes."""
        config = self.config
        images = torch.empty(samples, config.in_channels, config.image, config.image, device="meta")
        times = torch.empty(samples, dtype=torch.long, device="meta")
        return {"images": images, "noise": images, "times": times}

    def initial(self, name: str) -> Initial:
        """The initialisation of the named parameter: with the variance of torch's layers, as in diffusers."""
        return initial_by_fan(name, self._fan_ins, gain=1 / 3)
