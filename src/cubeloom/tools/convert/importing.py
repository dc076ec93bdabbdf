"""From a Hugging Face folder to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.models.description import describe
from cubeloom.models.hugging_face import Rule, rules_to_read
from cubeloom.tools.convert.checkpoint_files import write_weights
from cubeloom.tools.convert.dtypes import plain
from cubeloom.tools.convert.hugging_face_config import read_config
from cubeloom.tools.convert.hugging_face_folder import HuggingFaceFolder
from cubeloom.tools.convert.place import IMPORTED
from cubeloom.train.checkpoint import seal


class Import:
    """Everything that will be written is known, and the source is checked, before writing starts."""

    how = "imported"

    def __init__(self, folder: HuggingFaceFolder, dtype: torch.dtype | None) -> None:
        self._source, source = folder, folder.folder
        self._dtype = dtype
        try:
            self.config = read_config(self._source.config, self._source.tensors.keys())
            self._rules, tied = rules_to_read(self.config, self._source.tensors)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
        for copy, original in tied:
            if not _same_bits(self._source.read(copy), self._source.read(original)):
                raise UserError(
                    f"{source}: {copy} and {original} differ, but config.json says that they are tied "
                    "(tie_word_embeddings)"
                )
        self.tensors = {rule.ours: self._join(rule, self._shape) for rule in self._rules}

    @property
    def description(self) -> dict[str, Any]:
        return describe(self.config)

    def write(self, folder: Path, wrote: Callable[[Tensor], None]) -> int:
        """Returns the number of files with tensors."""

        rules = {rule.ours: rule for rule in self._rules}

        def values(name: str) -> Tensor:
            tensor = self._join(rules[name], self._source.read)
            wrote(tensor)
            return tensor

        checkpoint = folder / IMPORTED
        checkpoint.mkdir()
        files = write_weights(checkpoint, self.tensors, values)
        seal(checkpoint, 0, {"model": self.description, "hugging_face": self._source.config})
        return files

    def _shape(self, name: str) -> Tensor:
        return self._source.tensors[name]

    def _join(self, rule: Rule, read: Callable[[str], Tensor]) -> Tensor:
        theirs = [read(name) for name in rule.theirs]
        if self._dtype is not None:
            theirs = [tensor.to(self._dtype) for tensor in theirs]
        if len({tensor.dtype for tensor in theirs}) > 1:
            stored = ", ".join(
                f"{name} {plain(tensor.dtype)}" for name, tensor in zip(rule.theirs, theirs, strict=True)
            )
            raise UserError(
                f"{rule.ours} is made of tensors of one dtype, and these are {stored}; --dtype makes them one"
            )
        return rule.layout.join(theirs)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))
