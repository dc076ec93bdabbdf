"""The tensors of a Hugging Face folder, by the model's names."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cubeloom.base.errors import UserError


class StoredTensors:
    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as opened:
                    self._files.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is damaged, or not a safetensors file: {error}") from None

    @staticmethod
    def exist(folder: Path) -> bool:
        return any(folder.glob("*.safetensors"))

    def _spelling(self, name: str) -> str | None:
        """Base models are stored without the prefix of models with a head, and the reverse."""
        spellings = (name, name.partition(".")[2], f"model.{name}", f"transformer.{name}")
        return next((each for each in spellings if each in self._files), None)

    def has(self, name: str) -> bool:
        return self._spelling(name) is not None

    def block(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        found = self._spelling(name)
        assert found is not None
        with safe_open(self._files[found], "pt") as opened:
            return opened.get_slice(found)[slices] if slices else opened.get_tensor(found)
