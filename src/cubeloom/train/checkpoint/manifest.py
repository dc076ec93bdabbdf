"""What a checkpoint says of itself, and whether its files are what they were when it was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cubeloom.errors import UserError
from cubeloom.files import check_sealed, checksum, is_plain_name, read_json, sync_names, write_sealed

FORMAT = 2
MANIFEST = "manifest.json"


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
    write_sealed(folder / MANIFEST, manifest)
    sync_names(folder)


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones, oldest first."""
    return [path for path in _folders(folder) if (path / MANIFEST).exists()]


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of them, or in that of a run."""
    found = _folders(folder) or _folders(folder / "checkpoints")
    if not found:
        return None
    if not (found[-1] / MANIFEST).exists():
        # They get their names when they are whole: somebody took it away, and whoever goes on from another should know.
        raise damaged(found[-1], f"{MANIFEST} is missing")
    return found[-1]


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, once all its files are there; `check_files` says whether they are as written."""
    file = checkpoint / MANIFEST
    try:
        manifest = read_json(file)
    except FileNotFoundError:
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it has no {MANIFEST}") from None
    except NotADirectoryError:
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it is a file, not a folder") from None
    except UserError as error:
        raise damaged(checkpoint, str(error)) from None
    _check_format(checkpoint, manifest.get("format"))
    check_sealed(file, manifest)
    _check_types(checkpoint, manifest)
    for name in manifest["files"]:
        if not (checkpoint / name).exists():
            raise damaged(checkpoint, f"{name} is missing")
    return manifest


def _check_format(checkpoint: Path, found: object) -> None:
    if found == 1:
        raise UserError(
            f"{checkpoint} has format 1, of an earlier version, and this one reads {FORMAT}: to read format 1 could execute "
            "what somebody put there. Export it with the version that wrote it, and import that here (cubeloom convert)"
        )
    if found != FORMAT:
        raise UserError(f"{checkpoint} has format {found}, and this version reads {FORMAT}")


def _check_types(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Of a manifest that no program of ours wrote."""
    for name, kinds in (("step", int), ("updates", (int, float)), ("progress", dict), ("files", dict)):
        if not isinstance(manifest.get(name), kinds):
            raise damaged(checkpoint, f"{MANIFEST} lacks {name}, or it is not of its type")
    if not all(map(is_plain_name, manifest["files"])):
        raise damaged(checkpoint, f"{MANIFEST} names files outside of it")


def check_files(checkpoint: Path, manifest: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """That files are what they were when they were written: all, or those named."""
    for name in manifest["files"] if names is None else names:
        if name not in manifest["files"]:
            raise damaged(checkpoint, f"{MANIFEST} has no checksum of {name}")
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
    return sorted(file for file in folder.iterdir() if file.name != MANIFEST)
