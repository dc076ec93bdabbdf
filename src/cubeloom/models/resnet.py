"""ResNet and wide ResNets: basic blocks of two convolutions, batch norms, one class per image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cubeloom.base.initial import Initial, Normal
from cubeloom.models.configs import ResNetConfig
from cubeloom.models.layers import CrossEntropy, fan_ins, initial_by_fan
from cubeloom.models.pieces import Piece


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    def __init__(self, config: ResNetConfig, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs, eps=config.norm_eps)
        self.act = nn.ReLU()
        self.conv2 = _conv(outputs, outputs, 3, 1)
        self.bn2 = nn.BatchNorm2d(outputs, eps=config.norm_eps)
        changes = stride != 1 or inputs != outputs
        self.skip = _conv(inputs, outputs, 1, stride) if changes else None
        self.skip_norm = nn.BatchNorm2d(outputs, eps=config.norm_eps) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        if self.skip is not None and self.skip_norm is not None:
            x = self.skip_norm(self.skip(x))
        return self.act(inner + x)


class ResNet(nn.Module):
    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        small = config.small_images
        self.conv_in = (
            _conv(config.channels, config.width, 3, 1) if small else _conv(config.channels, config.width, 7, 2)
        )
        self.norm_in = nn.BatchNorm2d(config.width, eps=config.norm_eps)
        self.act = nn.ReLU()
        self.pool_in = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.ModuleList()
        before = config.width
        for stage, width in enumerate(config.widths):
            for number in range(config.blocks[stage]):
                self.blocks.append(Block(config, before, width, stride=2 if stage and number == 0 else 1))
                before = width
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(before, config.classes)
        self.loss = CrossEntropy(label_smoothing=config.label_smoothing)
        self._fan_ins = fan_ins(self)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """From `[samples, channels, height, width]` the logits `[samples, classes]`, or with targets the mean loss."""
        x = self.begin(images)
        for block in self.blocks:
            x = block(x)
        return self.end(x, targets)

    def begin(self, images: Tensor) -> Tensor:
        return self.pool_in(self.act(self.norm_in(self.conv_in(images))))

    def end(self, x: Tensor, targets: Tensor | None) -> Tensor:
        logits = self.head(self.pool(x).flatten(1))
        return logits if targets is None else self.loss(logits, targets)

    def pieces(self) -> list[Piece]:
        def piece(number: int) -> Piece:
            # The block is looked up when it runs, because a cut may have replaced its layers, or a stage the block.
            return Piece((f"blocks.{number}",), lambda carry, _: {"x": self.blocks[number](carry["x"])})

        return [
            Piece(("conv_in", "norm_in", "act", "pool_in"), lambda _, data: {"x": self.begin(data["images"])}),
            *(piece(number) for number in range(len(self.blocks))),
            Piece(
                ("pool", "head", "loss"),
                lambda carry, data: {"loss": self.end(carry["x"], data["targets"])},
                losses={"loss": "targets"},
            ),
        ]

    def example(self, samples: int) -> dict[str, Tensor]:
        """Inputs without values, to learn all shapes."""
        pixels = self.config.image
        images = torch.empty(samples, self.config.channels, pixels, pixels, device="meta")
        return {"images": images, "targets": torch.empty(samples, dtype=torch.long, device="meta")}

    def initial(self, name: str) -> Initial:
        """The initialisation of the named parameter: He's for convolutions before a ReLU, smaller for the head."""
        if name == "head.weight":
            return Normal(0.01)
        return initial_by_fan(name, self._fan_ins, gain=2.0)
