"""Whole training steps on one GPU as users of torch take them: eager, compiled, with Liger's loss, with torchao's FP8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn

from bench.peers import gpt
from bench.peers.gpt import GPT, Size, adamw
from bench.peers.llama import Llama, LlamaSize
from bench.peers.timing import Step

AnySize = Size | LlamaSize


@dataclass(frozen=True)
class Recipe:
    compiled: Literal["blocks", "whole"] | None = None
    fused_loss: bool = False  # head and cross-entropy in one, by Liger: logits are never whole in memory
    float8: str | None = None  # torchao's name for how numbers are scaled

    @property
    def packages(self) -> tuple[str, ...]:
        """That it needs besides torch; their kernels are a GPU's."""
        return ("liger_kernel",) * self.fused_loss + ("torchao",) * (self.float8 is not None)


PEER = "torch, compiled blocks"
RECIPES = {
    "torch": Recipe(),
    PEER: Recipe("blocks"),
    "torch, compiled whole": Recipe("whole"),
    "torch, compiled blocks, Liger": Recipe("blocks", fused_loss=True),
    "torch, compiled blocks, Liger, float8": Recipe("blocks", fused_loss=True, float8="tensorwise"),
}
OF_TORCH_ALONE = tuple(name for name, recipe in RECIPES.items() if not recipe.packages)


def missing(name: str, on_gpu: bool) -> str | None:
    """Why a recipe cannot be run here; None if it can, as each that is not torch's."""
    packages = RECIPES[name].packages if name in RECIPES else ()
    if packages and not on_gpu:
        return f"{name}, which needs a GPU"
    absent = [each for each in packages if find_spec(each) is None]
    return f"{name}, which needs {' and '.join(absent)}" if absent else None


def weights(size: AnySize, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Values to begin with, by the peer's names, so that everybody begins with the same."""
    return gpt.drawn(lambda: _skeleton(size), dtype, device)


def _skeleton(size: AnySize) -> GPT | Llama:
    return GPT(size) if isinstance(size, Size) else Llama(size)


def model_of(size: AnySize, values: dict[str, Tensor]) -> GPT | Llama:
    with torch.device("meta"):
        model = _skeleton(size)
    model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
    if isinstance(model, Llama):
        model.tabulate(values["embed.weight"])
    return model


def step(name: str, size: AnySize, values: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Step:
    recipe = RECIPES[name]
    model = model_of(size, values)
    if recipe.float8 is not None:
        _to_float8(model, recipe.float8)
    if recipe.compiled == "blocks":
        for block in model.blocks:
            block.compile()
    run: Callable[..., Tensor] = _FusedLoss(model) if recipe.fused_loss else model
    if recipe.compiled == "whole":
        run = torch.compile(run)
    optimizer = adamw(model)

    def one() -> Tensor:
        loss = run(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return one


class _FusedLoss(nn.Module):
    def __init__(self, model: GPT | Llama) -> None:
        super().__init__()
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        self.model, self.loss = model, LigerFusedLinearCrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rows = self.model.hidden(tokens).flatten(0, 1)
        found: Tensor = self.loss(self.model.head.weight, rows, targets.flatten())
        return found


def _to_float8(model: nn.Module, scaling: str) -> None:
    """The matmuls of blocks, where their sizes allow it; not the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(layer: nn.Module, name: str) -> bool:
        sizes = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()
        return name.startswith("blocks.") and all(each % 16 == 0 for each in sizes)

    config = Float8LinearConfig.from_recipe_name(scaling)
    convert_to_float8_training(model, config=config, module_filter_fn=fits)
