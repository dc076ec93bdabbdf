"""A folder that is written atomically."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cubeloom.base.errors import UserError
from cubeloom.base.files import replace_folder
from cubeloom.tools.convert.hugging_face_folder import CHECKSUMS, CONFIG, INDEX
from cubeloom.train.data.kept_tokenizer import FOLDER
from cubeloom.train.data.tokenizer_files import NAMES

IMPORTED = "step-00000000"
"""The name of the checkpoint that an import writes; others are from a training."""


def check_place(source: Path, target: Path, force: bool) -> None:
    """Refuse an existing target. `force` replaces it, but only if a conversion could have written it."""
    if source.resolve().is_relative_to(target.resolve()):
        raise UserError(f"{target} cannot be written: {source}, which is read, is there")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target} is there already, and is not a folder; choose another")
    if not target.exists():
        return
    if not force:
        raise UserError(f"{target} is there already; --force replaces it")
    strange = sorted(path.name for path in target.iterdir() if not _converted(path))
    if strange:
        raise UserError(
            f"{target} holds {strange[0]}, which no conversion writes; --force would remove it, so it does not"
        )


def _converted(path: Path) -> bool:
    return path.name in (CONFIG, INDEX, CHECKSUMS, IMPORTED, FOLDER, *NAMES) or path.suffix == ".safetensors"


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A folder to write in, beside the target, which is renamed when everything is written. A failure changes nothing."""
    writing = target.with_name(f".{target.name}.writing")
    try:
        try:
            shutil.rmtree(writing, ignore_errors=True)  # of a process that was killed
            writing.mkdir(parents=True)
            yield writing
            replace_folder(writing, target)
        finally:
            shutil.rmtree(writing, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from None
