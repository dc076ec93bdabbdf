"""A model of Hugging Face as a source: a folder with config.json, with or without weights."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.models.buffers import compute_buffers
from cubeloom.models.foreign import filled_by, forwarding_loss, random_batch, without_dropout
from cubeloom.models.stored import StoredTensors, is_hugging_face
from cubeloom.parallel import Batch
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.traced import Tracing


@dataclass(frozen=True)
class HuggingFaceModel:
    """A `ModelSource`. The architecture is the first that config.json names."""

    folder: str

    @property
    def name(self) -> str:
        return Path(self.folder).name

    @property
    def positions(self) -> int | None:
        config = _text(_config(self.folder))
        most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return int(most) if most else None

    @property
    def vocabulary(self) -> int | None:
        found = getattr(_text(_config(self.folder)), "vocab_size", None)
        return int(found) if found else None

    def build(self) -> nn.Module:
        config = copy(_config(self.folder))
        config._experts_implementation = "eager"  # grouped products want bfloat16, and sizes that a rank does not know
        made: nn.Module = _architecture(self.folder)(config)
        compute_buffers(made)
        return forwarding_loss(without_dropout(made))

    def cut(self, model: nn.Module) -> Tracing:
        return _tracing(self)

    def fill(self, model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> Fill:
        stored = StoredTensors(Path(self.folder)) if StoredTensors.exist(Path(self.folder)) else None
        return filled_by(model, seed, dtype, device, stored)

    def samples(self, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = _architecture(self.folder)(_config(self.folder))
        return random_batch(model, batch, seed, step, dtype)

    def describe(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((Path(self.folder) / "config.json").read_text(encoding="utf-8"))
        return {"family": "hugging_face", "config": config}


@cache
def _tracing(source: HuggingFaceModel) -> Tracing:
    return Tracing(lambda batch: source.samples(batch, 0, 0, torch.get_default_dtype()))


def _text(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


@cache
def _config(folder: str) -> Any:
    from transformers import AutoConfig

    if not is_hugging_face(Path(folder)):
        raise UserError(f"{folder} is no folder of Hugging Face's: it has no config.json")
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


@cache
def _architecture(folder: str) -> Any:
    import transformers

    names = _config(folder).architectures or []
    if not names or not hasattr(transformers, names[0]):
        found = names[0] if names else "no architecture"
        raise UserError(f"{folder}/config.json names {found}, which the transformers that is installed does not have")
    return getattr(transformers, names[0])
