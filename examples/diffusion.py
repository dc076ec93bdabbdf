"""Train a small U-Net to draw digits, on one core in about a minute, and see what it draws beside real ones.

    python examples/diffusion.py                          # writes digits.png
    python examples/diffusion.py --steps 4000 --seed 1    # longer, and other digits

The images are scikit-learn's: 1797 digits of 8x8 pixels, which come with it. Nothing here is parallel: this is the model
that a grid trains.
"""

from __future__ import annotations

import argparse
import struct
import zlib
from pathlib import Path

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import pad

from cubeloom.models import UNet, UNetConfig, noise_added

CONFIG = UNetConfig(
    image=8,
    in_channels=1,
    out_channels=1,
    channels=24,
    multipliers=(1, 2),
    attention=(False, True),
    res_blocks=1,
    head_dim=16,
    groups=8,
    steps=200,
    betas=(5e-4, 0.1),  # a fifth of DDPM's steps, each five times as noisy
)
BATCH = 32
ROWS, COLUMNS, ZOOM = 6, 8, 6  # of the picture: digits, twice as many columns with the real ones, and pixels a pixel


def main() -> None:
    options = parsed()
    torch.manual_seed(options.seed)
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1  # [1797, 1, 8, 8] from -1 to 1
    model = UNet(CONFIG)
    first, last = train(model, digits, options.steps)
    print(f"loss {first:.3f} at first, {last:.3f} in the last steps")
    drawn = sample(model, ROWS * COLUMNS)
    real = digits[torch.randperm(len(digits))[: ROWS * COLUMNS]]
    sides = tiled(drawn), tiled(real)
    write_png(options.output, torch.cat([sides[0], torch.ones(len(sides[0]), 2), sides[1]], dim=1))
    print(f"wrote {options.output}: drawn digits on the left, real ones on the right")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small U-Net on digits and draw some.")
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("-o", "--output", type=Path, default=Path("digits.png"), help="the picture to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights, noise and samples")
    return parser.parse_args()


def train(model: UNet, digits: Tensor, steps: int) -> tuple[float, float]:
    """The mean loss of the first and of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in track(range(steps), "training"):
        images = digits[torch.randint(len(digits), (BATCH,))]
        loss = model(images, torch.randn_like(images), torch.randint(CONFIG.steps, (BATCH,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    tenth = max(1, steps // 10)
    return sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth


@torch.no_grad()
def sample(model: UNet, count: int) -> Tensor:
    """DDPM's ancestral sampling: from noise alone, take away a step's noise at a time and add a little of new."""
    betas = noise_added(CONFIG).float()
    left = (1 - betas).cumprod(0)  # of the image's variance, after each step
    x = torch.randn(count, CONFIG.in_channels, CONFIG.image, CONFIG.image)
    for step in track(range(CONFIG.steps - 1, -1, -1), "drawing "):
        beta, before = betas[step], left[step - 1] if step else torch.tensor(1.0)
        noise = model.predict(x, torch.full((count,), step))
        image = ((x - (1 - left[step]).sqrt() * noise) / left[step].sqrt()).clamp(-1, 1)
        # The mean and the variance of the step before, given this one and the image that it seems to come from.
        mean = (before.sqrt() * beta * image + (1 - beta).sqrt() * (1 - before) * x) / (1 - left[step])
        x = mean + (beta * (1 - before) / (1 - left[step])).sqrt() * torch.randn_like(x)
    return x


def tiled(images: Tensor) -> Tensor:
    """`[ROWS * COLUMNS, 1, 8, 8]` as one image, with some black between the digits."""
    framed = pad(images, (2, 2, 2, 2), value=-1.0).unflatten(0, (ROWS, COLUMNS)).squeeze(2)
    return framed.transpose(1, 2).flatten(2).flatten(0, 1)


def write_png(path: Path, image: Tensor) -> None:
    """A gray image of values from -1 to 1, each pixel as a square of ZOOM."""
    gray = ((image.clamp(-1, 1) + 1) * 127.5).byte()
    rows = gray.repeat_interleave(ZOOM, 0).repeat_interleave(ZOOM, 1)
    lines = b"".join(b"\0" + row.numpy().tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        )
    )


if __name__ == "__main__":
    main()
