"""Images in a folder: `training.safetensors`, and optionally `validation.safetensors`, with `images` and `labels`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cubeloom.base import counter
from cubeloom.base.errors import UserError
from cubeloom.train.data import Permutation

SUFFIX = ".safetensors"


def file_of(folder: Path, part: str) -> Path:
    return folder / f"{part}{SUFFIX}"


@dataclass(frozen=True)
class Images:
    """`images` `[n, channels, height, width]`, of bytes or of numbers from -1 to 1; shuffled again in each epoch."""

    file: Path
    dtype: torch.dtype
    seed: int
    steps: int | None = None  # of noise, for a diffusion model
    shuffled: bool = True
    sequence: int = 1

    def __post_init__(self) -> None:
        wanted = ("images",) if self.steps else ("images", "labels")
        try:
            with safe_open(self.file, "pt") as opened:
                names = set(opened.keys())
                shape = opened.get_slice("images").get_shape() if "images" in names else []
        except (OSError, SafetensorError) as error:
            raise UserError(f"no images in {self.file}: {error}") from None
        if not set(wanted) <= names or len(shape) != 4 or not shape[0]:
            raise UserError(f"{self.file} should have {' and '.join(wanted)}, images as [n, channels, height, width]")

    @property
    def count(self) -> int:
        with safe_open(self.file, "pt") as opened:
            return int(opened.get_slice("images").get_shape()[0])

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        rows = self._rows(numbers)
        with safe_open(self.file, "pt") as opened:
            images = opened.get_slice("images")
            shown = torch.stack([images[row] for row in rows])
            targets = None if self.steps else opened.get_tensor("labels")[rows].long()
        if shown.dtype == torch.uint8:
            shown = shown.double() / 127.5 - 1
        found = {"images": shown.to(self.dtype)}
        return found | (self._noise(numbers, shown.shape) if targets is None else {"targets": targets})

    def _rows(self, numbers: Tensor) -> list[int]:
        count = self.count
        epochs, index = numbers // count, numbers % count
        if self.shuffled:
            for epoch in epochs.unique().tolist():
                here = epochs == epoch
                index[here] = Permutation(count, counter.key(self.seed, "epoch", epoch))(index[here])
        return [int(each) for each in index]

    def _noise(self, numbers: Tensor, shape: torch.Size) -> dict[str, Tensor]:
        assert self.steps is not None
        each = shape[1:].numel()
        places = (numbers[:, None] * each + torch.arange(each)).view(shape)
        first, second = (counter.uniform(counter.key(self.seed, what), places) for what in ("radius", "angle"))
        normal = torch.sqrt(-2 * torch.log(1 - first)) * torch.cos(2 * torch.pi * second)  # Box-Muller
        times = (counter.uniform(counter.key(self.seed, "times"), numbers) * self.steps).long()
        return {"noise": normal.to(self.dtype), "times": times}
