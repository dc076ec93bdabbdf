"""Writes files and folders atomically, and JSON with a checksum that is verified when it is read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.file_errors import FULL as FULL
from cubeloom.base.file_errors import retried

_SEAL = "checksum"


def replace_text(file: Path, text: str) -> None:
    replace_bytes(file, text.encode())


def replace_bytes(file: Path, content: bytes) -> None:
    """Write a file so that its name always has either the old or the new contents."""
    beside = file.with_name(f".{file.name}.partial")
    try:
        with beside.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        beside.rename(file)
    finally:
        beside.unlink(missing_ok=True)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError if the file has something else, and FileNotFoundError if there is none."""
    if not file.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    try:
        content = json.loads(retried(f"{file} cannot be read", lambda: file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it should be a JSON object")
    return content


def write_sealed(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a checksum of itself, for files that programs write for themselves and nobody should edit."""
    replace_text(file, json.dumps({**content, _SEAL: _seal(content)}, indent=1) + "\n")


def check_sealed(file: Path, content: dict[str, Any]) -> None:
    """Raises UserError unless this is what `write_sealed` wrote; removes the checksum."""
    if content.pop(_SEAL, None) != _seal(content):
        raise UserError(f"{file} is damaged: it is not what was written")


def _seal(content: Mapping[str, Any]) -> str:
    # As it is read back: numeric keys become text, and the order may change.
    plain = json.loads(json.dumps(content))
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def checksum(file: Path) -> str:
    def digest() -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "blake2b").hexdigest()

    return retried(f"{file} cannot be read", digest)


def is_plain_name(name: object) -> bool:
    """Whether it names a file in the same folder: a name that was read must not lead anywhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def write_asked(file: Path, text: str) -> None:
    """Atomically write a file that the user named. Errors are the user's to fix."""
    if file.is_dir():
        raise UserError(f"cannot write {file}: it is a folder; name a file in it")
    try:
        replace_text(file, text)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}") from None


def replace_folder(made: Path, target: Path) -> None:
    """Rename a folder beside the target to the target's name. The previous folder is removed afterwards, and restored
    if that fails.
    """
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # of a process that was killed
        target.rename(replaced)
    try:
        made.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def sync_names(folder: Path) -> None:
    """Make renames in a folder survive a power failure: syncing a file does not sync its name."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
