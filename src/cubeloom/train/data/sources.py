"""The source files: the kind, size and hash of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cubeloom.base.errors import UserError
from cubeloom.base.files import is_plain_name, read_json

Kind = Literal["text", "json lines", "parquet", "arrow"]
Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the bytes that are done, and the total."""

KINDS: dict[str, Kind] = {
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_PART = 1 << 22


@dataclass(frozen=True)
class Source:
    path: Path
    bytes: int
    sha256: str

    @property
    def kind(self) -> Kind:
        """By the suffix of its name; unknown files are text."""
        return KINDS.get(self.path.suffix.lower(), "text")

    def as_json(self) -> dict[str, str | int]:
        """Without the folder, so that moved data count as the same data."""
        return {"name": self.path.name, "bytes": self.bytes, "sha256": self.sha256}


def describe(paths: Sequence[Path], progress: Progress) -> list[Source]:
    """Every file is read once, for its hash. An unreadable file is refused before anything is written."""
    if not paths:
        raise UserError("no input: name text, .jsonl or .parquet files, or a folder of Hugging Face's save_to_disk")
    paths = [file for path in paths for file in files_of(path)]
    try:
        total, done, found = sum(path.stat().st_size for path in paths), 0, []
        for path in paths:
            size, digest = sha256(path, lambda read, done=done: progress("hashing", done + read, total))  # type: ignore[misc]
            found.append(Source(path, size, digest))
            done += size
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    return found


def files_of(path: Path) -> list[Path]:
    """The file, or those of a dataset that Hugging Face's `save_to_disk` wrote."""
    if not path.exists():
        raise UserError(f"no file at {path}")
    if not path.is_dir():
        return [path]
    if (path / _SPLITS).is_file():
        splits = read_json(path / _SPLITS).get("splits")
        names = [f"{path}/{name}" for name in splits] if isinstance(splits, list) else []
        raise UserError(f"{path} is a dataset in splits; name one of them: {', '.join(names)}")
    if not (path / _STATE).is_file():
        raise UserError(f"{path} is a folder; name the files in it, as in {path}/*.jsonl")
    state = read_json(path / _STATE)
    try:
        found = [str(each["filename"]) for each in state["_data_files"]]
    except (KeyError, TypeError):
        raise UserError(f"{path / _STATE} is damaged: it does not name the files of a dataset") from None
    if state.get("_indices_data_files"):
        raise UserError(f"{path} is a selection of rows; save dataset.flatten_indices() instead")
    for name in found:
        if not is_plain_name(name) or not (path / name).is_file():
            raise UserError(f"{path} is not whole: {name} is missing")
    return [path / name for name in found]


def is_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote it."""
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def sha256(path: Path, progress: Callable[[int], None] = lambda _: None) -> tuple[int, str]:
    """The size and hash of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
            size += len(part)
            progress(size)
    return size, digest.hexdigest()
