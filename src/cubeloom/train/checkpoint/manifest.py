"""What a checkpoint says of itself, and whether its files are what they were when it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cubeloom.errors import UserError
from cubeloom.files import replace_text, sync_names

FORMAT = 1
_MANIFEST = "manifest.json"


def seal(
    folder: Path,
    step: int,
    progress: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
    checksums: Mapping[str, str] | None = None,
) -> None:
    """Make a folder whose files are all written a checkpoint: add what it says of itself, and their checksums."""
    known = checksums or {}
    manifest = {
        "format": FORMAT,
        "step": step,
        **(optimizer or {"updates": 0.0}),
        "progress": dict(progress),
        "files": {file.name: known.get(file.name) or checksum(file) for file in _files(folder)},
    }
    # On disk before the folder gets its name: after a loss of power the name could be there, and an empty file under it.
    replace_text(folder / _MANIFEST, json.dumps(manifest, indent=1))
    sync_names(folder)


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones, oldest first."""
    return [path for path in _folders(folder) if (path / _MANIFEST).exists()]


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of them, or in that of a run."""
    found = _folders(folder) or _folders(folder / "checkpoints")
    if not found:
        return None
    if not (found[-1] / _MANIFEST).exists():
        # They get their names when they are whole: somebody took it away, and whoever goes on from another should know.
        raise damaged(found[-1], f"{_MANIFEST} is missing")
    return found[-1]


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, once all its files are there; `check_files` says whether they are as written."""
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / _MANIFEST).read_text())
    except FileNotFoundError:
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it has no {_MANIFEST}") from None
    except NotADirectoryError:
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it is a file, not a folder") from None
    except json.JSONDecodeError as error:
        raise damaged(checkpoint, f"{_MANIFEST}: {error}") from None
    if manifest.get("format") != FORMAT:
        raise UserError(f"{checkpoint} has format {manifest.get('format')}, and this version reads {FORMAT}")
    for name in manifest["files"]:
        if not (checkpoint / name).exists():
            raise damaged(checkpoint, f"{name} is missing")
    return manifest


def check_files(checkpoint: Path, manifest: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """That files are what they were when they were written: all, or those named."""
    for name in manifest["files"] if names is None else names:
        if checksum(checkpoint / name) != manifest["files"][name]:
            raise damaged(checkpoint, f"{name} is not what was written")


def damaged(checkpoint: Path, what: str) -> UserError:
    """Says from where one could go on instead."""
    older = [each for each in checkpoints(checkpoint.parent) if each.name < checkpoint.name]
    instead = (
        f"; {older[-1].name} beside it is older: to go on from there, take {checkpoint.name} away" if older else ""
    )
    return UserError(f"the checkpoint {checkpoint} is damaged: {what}{instead}")


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != _MANIFEST)


def checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()
