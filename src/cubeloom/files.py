"""Text files that are never seen half-written."""

from __future__ import annotations

import os
from pathlib import Path

from cubeloom.errors import UserError


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


def sync_names(folder: Path) -> None:
    """Have the names in a folder outlive a loss of power: what syncs a file does not sync the name it got."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
