"""A folder that transformers saved, read one tensor at a time."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.base.files import check_sealed, checksum, is_plain_name, read_json, write_sealed
from cubeloom.parallel.cut import pattern_of
from cubeloom.tools.convert.dtypes import DTYPES

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CHECKSUMS = "checksums.json"
"""Written by an export, because safetensors have no checksums. Other folders have no such file and are read without it.
"""


class HuggingFaceFolder:
    """`config`: the contents of config.json; `tensors`: those of all files, on the meta device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_sums(folder)
        self.config = _read(folder / CONFIG)
        self.tensors: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}
        index = _weight_map(folder)
        for file in [folder / SINGLE] if index is None else [folder / name for name in sorted(set(index.values()))]:
            self._add(file)
        for name, shard in (index or {}).items():
            if self._files.get(name) != folder / shard:
                raise UserError(f"{folder / INDEX} says that {name} is in {shard}, and it is not there")

    def read(self, name: str) -> Tensor:
        """The file is opened for one tensor only, so that its mapped memory is released with that tensor."""
        file = self._files[name]
        try:
            with safe_open(file, "pt") as opened:
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from None

    def block(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor. Only this part is read."""
        file = self._files[name]
        try:
            with safe_open(file, "pt") as opened:
                return opened.get_slice(name)[slices] if slices else opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from None

    def _add(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as opened:
                headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                found = {name: (header.get_shape(), header.get_dtype()) for name, header in headers.items()}
        except FileNotFoundError:
            raise UserError(f"{file.parent} is not whole: {file.name} is missing") from None
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from None
        for name, (shape, code) in found.items():
            if code not in DTYPES:
                raise UserError(f"{name} in {file} is stored as {code}; it must be {', '.join(DTYPES)}")
            if name in self._files:
                raise UserError(f"{name} is in {self._files[name].name} and again in {file}")
            self._files[name] = file
            self.tensors[name] = torch.empty(shape, dtype=DTYPES[code], device="meta")


def stored_as(folder: HuggingFaceFolder, model: nn.Module) -> dict[str, str]:
    """The stored tensor of each parameter of a model. Raises UserError if one is missing."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {same[0]: next(filter(folder.tensors.__contains__, _spellings(same)), None) for same in names.values()}
    lacking = [name for name, source in found.items() if source is None]
    if lacking:
        near = difflib.get_close_matches(lacking[0], folder.tensors, 1)
        hint = f"; the nearest that it has is {near[0]}" if near else ""
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise UserError(f"{folder.folder} is of another model: it has no {lacking[0]}{more}{hint}")
    return {name: source for name, source in found.items() if source is not None}


def refuse_more(folder: HuggingFaceFolder, names: Iterable[str], model: str) -> None:
    """Refuse layers that the model does not have, as in the folder of a deeper model. Other heads and buffers are
    allowed.
    """
    taken = set(_spellings(names))
    patterns = {pattern_of(name) for name in taken}
    more = [name for name in folder.tensors if name not in taken and pattern_of(name) in patterns]
    if more:
        others = f" (and {len(more) - 1} more)" if len(more) > 1 else ""
        raise UserError(f"{folder.folder} is of another model: it has {more[0]}{others}, and this {model} has not")


def _spellings(names: Iterable[str]) -> Iterator[str]:
    """Base models are stored without the prefix of models with a head, and the reverse."""
    for name in names:
        yield name
        yield name.partition(".")[2]
        yield f"model.{name}"


def is_hugging_face(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def write_sums(folder: Path) -> None:
    write_sealed(folder / CHECKSUMS, {file.name: checksum(file) for file in sorted(folder.iterdir())})


def _check_sums(folder: Path) -> None:
    """Check that every file of an export is unchanged."""
    file = folder / CHECKSUMS
    if not file.exists():
        return
    expected = _read(file)
    check_sealed(file, expected)
    for name, digest in expected.items():
        path = folder / name
        if not is_plain_name(name) or not path.is_file():
            raise UserError(f"{folder} is not whole: {name} is missing")
        if checksum(path) != digest:
            raise UserError(
                f"{path} is damaged: it is not what was written. If somebody changed it on purpose, remove {file}"
            )


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor; None if one file has all."""
    if (folder / SINGLE).is_file():
        return None
    if not (folder / INDEX).is_file():
        others = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
        raise UserError(
            f"{folder} has neither {SINGLE} nor {INDEX}, but {others}; weights in another format must be saved as "
            "safetensors first"
        )
    found = _read(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise UserError(f"{folder / INDEX} is damaged: weight_map should say in which file each tensor is")
    return found


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(f"{file} is damaged, or not a safetensors file: {error}")
