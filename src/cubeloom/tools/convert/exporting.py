"""From a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.models import LanguageConfig, to_hugging_face
from cubeloom.models.description import describe
from cubeloom.models.hugging_face import rules_to_write
from cubeloom.tools.convert.checkpoint_files import CheckpointWeights, config_of
from cubeloom.tools.convert.dtypes import CODES, plain
from cubeloom.tools.convert.hugging_face_config import write_config
from cubeloom.tools.convert.hugging_face_folder import CONFIG, write_sums
from cubeloom.tools.convert.safetensors_files import SafetensorsFiles


class Export:
    """Everything that will be written is known, and the source is checked, before writing starts."""

    how = "exported"

    def __init__(self, checkpoint: Path, source: CheckpointWeights, dtype: torch.dtype | None, shard_size: int) -> None:
        self._source = source
        self._dtype = dtype
        self._shard_size = shard_size
        self.config = _config(checkpoint, self._source.progress)
        self._rules = rules_to_write(self.config)
        try:
            shapes = to_hugging_face(self.config, self._source.tensors)
        except UserError as error:
            raise UserError(f"{checkpoint}: {error}") from None
        self.tensors = {name: self._cast(shapes[name]) for rule in self._rules for name in rule.theirs}
        for name, tensor in self.tensors.items():
            if tensor.dtype not in CODES:
                raise UserError(f"{checkpoint}: {name} is {plain(tensor.dtype)}; give --dtype to write another")

    @property
    def description(self) -> dict[str, Any]:
        return describe(self.config)

    def write(self, folder: Path, wrote: Callable[[Tensor], None]) -> int:
        """Returns the number of files with tensors."""
        (usual, _), *_ = Counter(plain(tensor.dtype) for tensor in self.tensors.values()).most_common()
        config = write_config(self.config, usual, self._source.progress.get("hugging_face", {}))
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        files = SafetensorsFiles(folder, self.tensors, self._shard_size)
        for rule in self._rules:
            parts = rule.layout.split(self._cast(self._source.read(rule.ours, self._dtype)))
            for name, part in zip(rule.theirs, parts, strict=True):
                files.write(name, part)
                wrote(part)
        files.finish()
        write_sums(folder)
        return len(files.files)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self._dtype is None else tensor.to(self._dtype)


def _config(checkpoint: Path, progress: Mapping[str, Any]) -> LanguageConfig:
    config = config_of(checkpoint, progress)
    if not isinstance(config, LanguageConfig):
        raise UserError(
            f"the checkpoint {checkpoint} is of a {progress['model']['family']}; those of gpt, llama and bert can be exported"
        )
    return config
