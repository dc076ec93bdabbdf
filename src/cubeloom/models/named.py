"""A model by its name: a preset, a Hugging Face folder, or `file.py:function`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cubeloom.base.errors import UserError
from cubeloom.models.presets import PRESETS

if TYPE_CHECKING:
    from cubeloom.models.source import ModelSource


def named(name: str) -> ModelSource:
    """Raises UserError if it is none of these."""
    match kind_of(name):
        case "preset":
            from cubeloom.models.our_model import preset  # each of the three needs torch, and `kind_of` does not

            return preset(name)
        case "file":
            from cubeloom.models.user_model import UserModel

            file, _, function = name.rpartition(":")
            return UserModel(str(Path(file).resolve()), function)
        case "folder":
            from cubeloom.models.hugging_face_model import HuggingFaceModel

            return HuggingFaceModel(str(Path(name).resolve()))


def kind_of(name: str) -> Literal["preset", "file", "folder"]:
    """Raises UserError if it is none of these."""
    if name in PRESETS:
        return "preset"
    file = name.rpartition(":")[0]
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise UserError(f"model {name!r}: there is no file {file}")
        return "file"
    if name.endswith(".py"):
        raise UserError(f"model {name!r}: say which function of the file gives the model, as {name}:build")
    if Path(name).is_dir():
        if not is_hugging_face(Path(name)):
            raise UserError(f"model {name!r} is a folder without config.json, which Hugging Face's have")
        return "folder"
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
    raise UserError(
        f"unknown model {name!r}; did you mean {near!r}? A model is a preset ({', '.join(PRESETS)}), a Hugging Face folder, or"
        " file.py:function"
    )


def is_hugging_face(folder: Path) -> bool:
    return (folder / "config.json").is_file()
