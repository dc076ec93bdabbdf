"""What a checkpoint says of itself, and whether its files are what they were when it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
    return sorted(path for path in folder.glob("step-*") if (path / _MANIFEST).exists())


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of them, or in that of a run."""
    found = checkpoints(folder) or checkpoints(folder / "checkpoints")
    return found[-1] if found else None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, once its files are what they were when it was written."""
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / _MANIFEST).read_text())
    except FileNotFoundError:
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it has no {_MANIFEST}") from None
    except NotADirectoryError:
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it is a file, not a folder") from None
    except json.JSONDecodeError as error:
        raise UserError(f"the checkpoint {checkpoint} is damaged: {_MANIFEST}: {error}") from None
    if manifest.get("format") != FORMAT:
        raise UserError(f"{checkpoint} has format {manifest.get('format')}, and this version reads {FORMAT}")
    for name, written in manifest["files"].items():
        file = checkpoint / name
        if not file.exists():
            raise UserError(f"the checkpoint {checkpoint} is damaged: {name} is missing")
        if checksum(file) != written:
            raise UserError(f"the checkpoint {checkpoint} is damaged: {name} is not what was written")
    return manifest


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != _MANIFEST)


def checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()
