"""Small inputs, and comparisons of whole folders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow
from pyarrow import parquet

STORIES = [
    "Es war einmal.",
    "Ünïcode → text\u2028with a strange line",
    "",
    "three\nlines\nhere",
    "<|endoftext|> is text",
]


def json_lines(path: Path, texts: Iterable[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
    return path


def parquet_file(path: Path, texts: list[str], rows: int) -> Path:
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=rows)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
