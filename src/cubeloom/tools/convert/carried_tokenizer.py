"""Converts the tokenizer together with the weights, if the source has one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cubeloom.base.errors import UserError
from cubeloom.tools.convert.hugging_face_folder import is_hugging_face
from cubeloom.train.data.hugging_face import HuggingFace
from cubeloom.train.data.kept_tokenizer import keep, kept_files
from cubeloom.train.data.tokenizer_files import TOKENIZER, TokenizerFiles


def carry_tokenizer(source: Path, target: Path) -> None:
    """From a Hugging Face folder to its import, or from a checkpoint's run or import to its export."""
    if not is_hugging_face(source):
        for name, text in kept_files(source).items():
            (target / name).write_text(text, encoding="utf-8")
    elif (source / TOKENIZER).is_file():
        with suppress(UserError):  # weights are imported, whatever else is in the folder
            files = TokenizerFiles.read(source)
            keep(HuggingFace(files.where, files.end), files.texts, target)
