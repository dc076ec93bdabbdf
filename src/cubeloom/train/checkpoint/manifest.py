"""A checkpoint's description of itself, and whether its files are unchanged since they were written."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.file_errors import PAUSES, FilesFailed, retried
from cubeloom.base.files import check_sealed, checksum, is_plain_name, read_json, sync_names, write_sealed

FORMAT = 3
# Earlier versions, and why they are not read.
EARLIER = {
    1: "to read format 1 could execute what somebody put there",
    2: "a Llama's queries, keys and values, gates and ups lay otherwise in it",
}
MANIFEST = "manifest.json"
BEST = "best_step"
"""In the progress: the step after which the validation loss was lowest."""


def seal(
    folder: Path,
    step: int,
    progress: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
    checksums: Mapping[str, str] | None = None,
    named: Iterable[str] | None = None,
) -> None:
    """Complete a checkpoint in a folder whose files are all written: add its manifest, with their checksums.

    `checksums`: of the files that ranks say they wrote; `named`: the files that the checkpoint's index names. Raises
    FilesFailed unless these and the files in the folder are the same.
    """
    known = checksums or {}
    expected = None if named is None else set(named)
    if expected is not None and expected != set(known):
        said = _differences(written_only=set(known) - expected, named_only=expected - set(known))
        raise FilesFailed(f"{folder} is not whole: {said}")
    manifest = {
        "format": FORMAT,
        "step": step,
        **(optimizer or {"updates": 0.0}),
        "progress": dict(progress),
        "files": {name: known.get(name) or checksum(folder / name) for name in _listed(folder, expected)},
    }
    # On disk before the folder gets its name: after a power failure the name could exist with an empty file in it.
    write_sealed(folder / MANIFEST, manifest)
    sync_names(folder)


def _listed(folder: Path, expected: set[str] | None) -> list[str]:
    """The names of the files there. A file server may need a moment to list what other machines wrote."""
    for pause in (*PAUSES, None):
        found = {file.name for file in folder.iterdir() if file.name != MANIFEST and not file.name.startswith(".nfs")}
        if expected is None or found == expected:
            break
        if pause is None:
            raise FilesFailed(
                f"{folder} is not whole: {_differences(missing=expected - found, extra=found - expected)}"
            )
        time.sleep(pause)
    return sorted(found)


def _differences(
    written_only: Iterable[str] = (),
    named_only: Iterable[str] = (),
    missing: Iterable[str] = (),
    extra: Iterable[str] = (),
) -> str:
    words = {
        "the index does not name what ranks wrote": written_only,
        "no rank wrote what the index names": named_only,
        "missing is what ranks wrote": missing,
        "unknown": extra,
    }
    return "; ".join(f"{what}: {_some(names)}" for what, names in words.items() if names)


def _some(names: Iterable[str]) -> str:
    first, rest = sorted(names)[:8], sorted(names)[8:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return [path for path in _folders(folder) if (path / MANIFEST).exists()]


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of checkpoints, or in the folder of a run."""
    found = _folders(folder) or _folders(folder / "checkpoints")
    if not found:
        return None
    if not (found[-1] / MANIFEST).exists():
        # Complete checkpoints have a manifest: someone removed it, and resuming from another should not happen
        # silently.
        raise damaged(found[-1], f"{MANIFEST} is missing")
    return found[-1]


def best(folder: Path) -> Path | None:
    """The checkpoint with the lowest validation loss; None if there was no evaluation, or it was not kept."""
    found = newest(folder)
    step = None if found is None else read_manifest(found)["progress"].get(BEST)
    if found is None or type(step) is not int:
        return None
    kept = found.with_name(name_of_step(step))
    return kept if kept.exists() else None


def name_of_step(step: int) -> str:
    """The name of the checkpoint after this many steps."""
    return f"step-{step:08d}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The description of a checkpoint, after checking that all its files exist. `check_files` compares their contents."""
    file = checkpoint / MANIFEST
    if checkpoint.is_file():
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it is a file, not a folder")
    if not file.exists():
        raise UserError(f"{checkpoint} is not a checkpoint of cubeloom: it has no {MANIFEST}")
    try:
        manifest = read_json(file)
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
    if isinstance(found, int) and found in EARLIER:
        raise UserError(
            f"{checkpoint} has format {found}, of an earlier version, and this one reads {FORMAT}: {EARLIER[found]}. "
            "Export it with the version that wrote it, and import that here (cubeloom convert)"
        )
    if found != FORMAT:
        raise UserError(f"{checkpoint} has format {found}, and this version reads {FORMAT}")


def _check_types(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Check the types in a manifest, which another program may have written."""
    for name, kinds in (("step", int), ("updates", (int, float)), ("progress", dict), ("files", dict)):
        if not isinstance(manifest.get(name), kinds):
            raise damaged(checkpoint, f"{MANIFEST} lacks {name}, or it is not of its type")
    if not all(map(is_plain_name, manifest["files"])):
        raise damaged(checkpoint, f"{MANIFEST} names files outside of it")


def check_files(checkpoint: Path, manifest: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """Check that files are unchanged since they were written: all, or those named."""
    for name in manifest["files"] if names is None else names:
        if name not in manifest["files"]:
            raise damaged(checkpoint, f"{MANIFEST} has no checksum of {name}")
        if checksum(checkpoint / name) != manifest["files"][name]:
            raise damaged(checkpoint, f"{name} is not what was written")


def damaged(checkpoint: Path, what: str) -> UserError:
    """An error that also says from where one could resume instead."""
    older = [each for each in checkpoints(checkpoint.parent) if each.name < checkpoint.name]
    instead = (
        f"; {older[-1].name} beside it is older: to go on from there, take {checkpoint.name} away" if older else ""
    )
    return UserError(f"the checkpoint {checkpoint} is damaged: {what}{instead}")


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def wait_until_seen(checkpoint: Path, chosen: str) -> None:
    """A file server may need a moment to show this machine a checkpoint that another one sees."""
    retried(f"{checkpoint}, which {chosen}, cannot be seen here", (checkpoint / MANIFEST).stat, also=(errno.ENOENT,))
