"""A model by what a user calls it: a preset, a folder of Hugging Face's, or `file.py:function`."""

from __future__ import annotations

import difflib
from pathlib import Path

from cubeloom.base.errors import UserError
from cubeloom.models.hugging_face_model import HuggingFaceModel
from cubeloom.models.our_model import preset
from cubeloom.models.presets import PRESETS
from cubeloom.models.source import ModelSource
from cubeloom.models.stored import is_hugging_face
from cubeloom.models.user_model import UserModel


def named(name: str) -> ModelSource:
    """Raises UserError where it is none of these."""
    if name in PRESETS:
        return preset(name)
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise UserError(f"model {name!r}: there is no file {file}")
        return UserModel(str(Path(file).resolve()), function)
    if name.endswith(".py"):
        raise UserError(f"model {name!r}: say which function of the file gives the model, as {name}:build")
    if Path(name).is_dir():
        if not is_hugging_face(Path(name)):
            raise UserError(f"model {name!r} is a folder without config.json, which Hugging Face's have")
        return HuggingFaceModel(str(Path(name).resolve()))
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
    raise UserError(
        f"unknown model {name!r}; did you mean {near!r}? A model is a preset ({', '.join(PRESETS)}), a Hugging Face folder, or"
        " file.py:function"
    )
