"""The files that a user names: what kind each is, its size and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cubeloom.base.errors import UserError

Kind = Literal["text", "json lines", "parquet"]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many bytes of it are done, and how many there are."""

KINDS: dict[str, Kind] = {".jsonl": "json lines", ".ndjson": "json lines", ".json": "json lines", ".parquet": "parquet"}
_PART = 1 << 22


@dataclass(frozen=True)
class Source:
    path: Path
    bytes: int
    sha256: str

    @property
    def kind(self) -> Kind:
        """By the end of its name; what we do not know is text."""
        return KINDS.get(self.path.suffix.lower(), "text")

    def as_json(self) -> dict[str, str | int]:
        """Without the folder, so that data that were moved are the same data."""
        return {"name": self.path.name, "bytes": self.bytes, "sha256": self.sha256}


def describe(paths: Sequence[Path], progress: Progress) -> list[Source]:
    """Every file is read once, for its hash; one that cannot be read is refused before anything is written."""
    if not paths:
        raise UserError("no input: name text, .jsonl or .parquet files")
    for path in paths:
        if path.is_dir():
            raise UserError(f"{path} is a folder; name the files in it, as in {path}/*.jsonl")
        if not path.exists():
            raise UserError(f"no file at {path}")
    try:
        total, done, found = sum(path.stat().st_size for path in paths), 0, []
        for path in paths:
            size, digest = sha256(path, lambda read, done=done: progress("hashing", done + read, total))  # type: ignore[misc]
            found.append(Source(path, size, digest))
            done += size
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    return found


def sha256(path: Path, progress: Callable[[int], None] = lambda _: None) -> tuple[int, str]:
    """The size of a file and its hash."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
            size += len(part)
            progress(size)
    return size, digest.hexdigest()
