"""Files and folders that are never seen half-written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cubeloom.errors import UserError
from cubeloom.file_errors import FULL as FULL


def replace_text(file: Path, text: str) -> None:
    """Write a file so that under its name there is always the old text or the new."""
    beside = file.with_name(f".{file.name}.partial")
    try:
        with beside.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        beside.rename(file)
    finally:
        beside.unlink(missing_ok=True)


def write_asked(file: Path, text: str) -> None:
    """The same for a file that the user named: what keeps it from being written is the user's to mend."""
    if file.is_dir():
        raise UserError(f"cannot write {file}: it is a folder; name a file in it")
    try:
        replace_text(file, text)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}") from None


def replace_folder(made: Path, target: Path) -> None:
    """Give a folder that lies beside it the target's name. What was there goes once its successor has come, and comes back
    if that fails."""
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # of one that was killed
        target.rename(replaced)
    try:
        made.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def sync_names(folder: Path) -> None:
    """Have the names in a folder outlive a loss of power: what syncs a file does not sync the name it got."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
