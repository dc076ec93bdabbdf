"""A Hugging Face model as a source: a folder with config.json, with or without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError, first_line
from cubeloom.models.buffers import compute_buffers
from cubeloom.models.external import filled_by, forwarding_loss, random_batch, without_dropout
from cubeloom.models.named import LOSSES, is_hugging_face
from cubeloom.models.naming import Naming, naming_of_hugging_face
from cubeloom.models.stored import StoredTensors
from cubeloom.parallel import Batch
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.traced import Tracing
from cubeloom.parallel.traced.without_values import EXPERTS

FAMILY = "hugging_face"
"""The kind of such models in a checkpoint's description."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """A `ModelSource`. The architecture is the first one in config.json."""

    folder: str
    loss: str | None = None
    """A name in LOSSES, instead of the model's own."""

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

    @property
    def traced(self) -> bool:
        return True

    def build(self) -> nn.Module:
        made = _made(_architecture(self.folder), _config(self.folder), f"{self.folder}/config.json")
        return forwarding_loss(without_dropout(made), loss=None if self.loss is None else LOSSES.find(self.loss))

    def cut(self, model: nn.Module) -> Tracing:
        return _tracing(self)

    def fill(self, model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> Fill:
        stored = StoredTensors(Path(self.folder)) if StoredTensors.exist(Path(self.folder)) else None
        return filled_by(model, seed, dtype, device, stored)

    def samples(self, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = _architecture(self.folder)(_config(self.folder))
        return random_batch(model, batch, seed, step, dtype)

    @property
    def naming(self) -> Naming:
        config = _config(self.folder)
        found = naming_of_hugging_face(_architecture(self.folder), bool(getattr(config, "is_encoder_decoder", False)))
        return found if self.loss is None else replace(found, shifted=False)  # only its own loss shifts the targets

    def describe(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((Path(self.folder) / "config.json").read_text(encoding="utf-8"))
        return {"family": FAMILY, "config": config}


@cache
def _tracing(source: HuggingFaceModel) -> Tracing:
    return Tracing(lambda batch: source.samples(batch, 0, 0, torch.get_default_dtype()))


def _text(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


@cache
def _config(folder: str) -> Any:
    auto = _transformers().AutoConfig
    if not is_hugging_face(Path(folder)):
        raise UserError(f"{folder} is no folder of Hugging Face's: it has no config.json")
    return auto.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


@cache
def _architecture(folder: str) -> Any:
    return _class_of(_config(folder), f"{folder}/config.json")


def _class_of(config: Any, where: str) -> Any:
    transformers = _transformers()
    names = config.architectures or []
    if not names or not hasattr(transformers, names[0]):
        found = names[0] if names else "no architecture"
        raise UserError(f"{where} names {found}, which the transformers that is installed does not have")
    return getattr(transformers, names[0])


def is_known(kind: str) -> bool:
    """Whether transformers has models of this `model_type`."""
    return kind in _transformers().CONFIG_MAPPING


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("models of Hugging Face need the package transformers: pip install transformers") from None
    return transformers


def from_description(description: Mapping[str, Any], where: str) -> nn.Module:
    """The module that `HuggingFaceModel.describe` described, without values. `where` it was read is for errors."""
    auto = _transformers().AutoConfig
    said = description.get("config")
    kind = said.get("model_type") if isinstance(said, dict) else None
    try:
        config = type(auto.for_model(kind)).from_dict(said)
    except Exception as error:  # transformers may refuse a configuration in any way
        raise UserError(f"{where} is of a model that is not known here: {first_line(error)}") from None
    with torch.device("meta"):
        return _made(_class_of(config, where), config, where)


def _made(architecture: Any, config: Any, where: str) -> nn.Module:
    config = deepcopy(config)
    setattr(config, EXPERTS, "eager")  # grouped matmuls need bfloat16, and sizes that a rank does not know
    for each in (config, _text(config)):
        if hasattr(each, "use_cache"):
            each.use_cache = False  # training does not read keys and values again
    try:
        made: nn.Module = architecture(config)
        compute_buffers(made)
    except Exception as error:  # transformers may refuse such sizes in any way
        raise UserError(f"{where} is of a model that cannot be built: {first_line(error)}") from None
    return made
