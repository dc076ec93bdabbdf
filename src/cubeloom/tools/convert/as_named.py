"""Models that keep Hugging Face's names in a checkpoint: folders whose architecture is not one of ours."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.models import skeleton
from cubeloom.models.hugging_face_model import HuggingFaceModel, from_description
from cubeloom.tools.convert.checkpoint_files import CheckpointWeights, write_weights
from cubeloom.tools.convert.dtypes import CODES, plain
from cubeloom.tools.convert.hugging_face_folder import CONFIG, HuggingFaceFolder, stored_as, write_sums
from cubeloom.tools.convert.place import IMPORTED
from cubeloom.tools.convert.safetensors_files import SafetensorsFiles
from cubeloom.train.checkpoint import check_fits, seal


class ImportAsNamed:
    """Everything that will be written is known, and the source is checked, before writing starts."""

    how = "imported"

    def __init__(self, folder: HuggingFaceFolder, dtype: torch.dtype | None) -> None:
        self._folder, self._dtype = folder, dtype
        source = HuggingFaceModel(str(folder.folder))
        model = skeleton(source)
        self.description = source.describe()
        self._stored = stored_as(folder, model)
        self.tensors = {name: self._cast(folder.tensors[stored]) for name, stored in self._stored.items()}
        for name, parameter in model.named_parameters():
            if (there := self.tensors[name].shape) != parameter.shape:
                raise UserError(
                    f"{folder.folder} is damaged: {self._stored[name]} is {list(there)}, and {list(parameter.shape)} by its"
                    f" {CONFIG}"
                )

    def write(self, folder: Path, wrote: Callable[[Tensor], None]) -> int:
        """Returns the number of files with tensors."""

        def values(name: str) -> Tensor:
            tensor = self._cast(self._folder.read(self._stored[name]))
            wrote(tensor)
            return tensor

        checkpoint = folder / IMPORTED
        checkpoint.mkdir()
        files = write_weights(checkpoint, self.tensors, values)
        seal(checkpoint, 0, {"model": self.description})
        return files

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self._dtype is None else tensor.to(self._dtype)


class ExportAsNamed:
    """The reverse of `ImportAsNamed`."""

    how = "exported"

    def __init__(self, checkpoint: Path, source: CheckpointWeights, dtype: torch.dtype | None, shard_size: int) -> None:
        self._source, self._dtype, self._shard_size = source, dtype, shard_size
        self.description: dict[str, Any] = dict(source.progress["model"])
        model = from_description(self.description, f"the checkpoint {checkpoint}")
        check_fits(checkpoint, {name: each.shape for name, each in model.named_parameters()})
        self.tensors = {name: self._cast(source.tensors[name]) for name, _ in model.named_parameters()}
        for name, tensor in self.tensors.items():
            if tensor.dtype not in CODES:
                raise UserError(f"{checkpoint}: {name} is {plain(tensor.dtype)}; give --dtype to write another")

    def write(self, folder: Path, wrote: Callable[[Tensor], None]) -> int:
        """Returns the number of files with tensors."""
        (usual, _), *_ = Counter(plain(tensor.dtype) for tensor in self.tensors.values()).most_common()
        config = {name: value for name, value in self.description["config"].items() if name != "torch_dtype"}
        text = json.dumps(config | {"dtype": usual}, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")
        files = SafetensorsFiles(folder, self.tensors, self._shard_size)
        for name in self.tensors:
            tensor = self._cast(self._source.read(name, self._dtype))
            files.write(name, tensor)
            wrote(tensor)
        files.finish()
        write_sums(folder)
        return len(files.files)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self._dtype is None else tensor.to(self._dtype)
