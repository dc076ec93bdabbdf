"""A model by its name: a preset, a Hugging Face folder, or `file.py:function`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cubeloom.base.errors import UserError
from cubeloom.base.registry import Lazy, Registry, nearest, own_function
from cubeloom.models.presets import PRESETS

if TYPE_CHECKING:
    from cubeloom.models.losses import Loss
    from cubeloom.models.source import ModelSource

_LOSSES = "cubeloom.models.losses"
LOSSES: Registry[Loss] = Registry(
    "loss", {name: Lazy(f"{_LOSSES}:{name}") for name in ("cross_entropy", "mse")}, functions=True
)
"""For models that do not compute their own loss."""


def named(name: str, loss: str | None = None) -> ModelSource:
    """`loss`: instead of the model's own. Raises UserError if there is no such model."""
    match kind_of(name):
        case "preset":
            from cubeloom.models.our_model import preset  # each of the three needs torch, and `kind_of` does not

            return preset(name)
        case "file":
            from cubeloom.models.user_model import UserModel

            file, function = own_function(name) or ("", "")
            return UserModel(file, function, loss=loss)
        case "folder":
            from cubeloom.models.hugging_face_model import HuggingFaceModel

            return HuggingFaceModel(str(Path(name).resolve()), loss)


def kind_of(name: str) -> Literal["preset", "file", "folder"]:
    """Raises UserError if it is none of these."""
    if name in PRESETS:
        return "preset"
    if own_function(name) is not None:
        return "file"
    if Path(name).is_dir():
        if not is_hugging_face(Path(name)):
            raise UserError(f"model {name!r} is a folder without config.json, which Hugging Face's have")
        return "folder"
    raise UserError(
        f"unknown model {name!r}{nearest(name, PRESETS)} A model is a preset ({', '.join(PRESETS)}), a Hugging Face folder, or"
        " file.py:function"
    )


def is_hugging_face(folder: Path) -> bool:
    return (folder / "config.json").is_file()
