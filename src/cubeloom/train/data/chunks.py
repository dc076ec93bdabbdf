"""Reads sources in chunks, each with the position of the next, so that reading can be resumed.

The end of a chunk depends only on the source: an interrupted run sees the same chunks as an uninterrupted one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cubeloom.base.errors import UserError
from cubeloom.train.data import tables
from cubeloom.train.data.reading import Piece, Reading
from cubeloom.train.data.sources import Source

CHUNK = 1 << 22


@dataclass(frozen=True)
class Place:
    """A position in a source: bytes, or rows of a table; and the number of lines before it, for messages."""

    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class Chunk:
    pieces: list[Piece]
    after: Place
    read: int
    """Bytes of the source up to the end of this chunk; for Parquet in proportion to rows."""


def chunks(source: Source, start: Place, reading: Reading) -> Iterator[Chunk]:
    """The rest of a source."""
    if source.kind == "text":
        yield from _text(source, start, reading.separator)
    elif source.kind == "json lines":
        yield from _json_lines(source, start, reading)
    else:
        yield from _table(source, start, reading)


def fields(source: Source) -> list[str]:
    """The fields of the first record; none for text, or if it is not a record."""
    if source.kind == "text":
        return []
    if source.kind != "json lines":
        return tables.names(source)
    with source.path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
    try:
        record = json.loads(first.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return []  # reading it will report the error
    return list(record) if isinstance(record, dict) else []


def _text(source: Source, start: Place, separator: str | None) -> Iterator[Chunk]:
    for offset, data in _blocks(source.path, start.offset, whole_lines=separator is not None):
        end = offset + len(data)
        pieces = _cut(_decode(data, source.path, offset), separator, last=end == source.bytes)
        yield Chunk(pieces, Place(end), end)


def _cut(text: str, separator: str | None, last: bool) -> list[Piece]:
    """A line that equals the separator ends a document, and so does the end of the file."""
    if separator is None:
        return [Piece(text, last)]
    end_of_line = r"\r?(?:\n|\Z)" if last else r"\r?\n"
    *whole, rest = re.split(f"^{re.escape(separator)}{end_of_line}", text, flags=re.MULTILINE)
    return [*(Piece(part, True) for part in whole), Piece(rest, last)]


def _json_lines(source: Source, start: Place, reading: Reading) -> Iterator[Chunk]:
    line = start.line
    for offset, data in _blocks(source.path, start.offset, whole_lines=True):
        pieces = []
        # Lines end in a newline only: text may contain other line separators, such as U+2028.
        lines = _decode(data, source.path, offset).removesuffix("\n").split("\n")
        for number, text in enumerate(lines, line + 1):
            if text.strip():
                where = f"{source.path} line {number}"
                pieces += reading.pieces(_record(text, reading.field, where), where)
        line += len(lines)
        end = offset + len(data)
        yield Chunk(pieces, Place(end, line), end)


def _record(text: str, field: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{where} is not JSON that can be read: it is nested too deeply") from None
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object with a field {field!r}")
    return record


def _table(source: Source, start: Place, reading: Reading) -> Iterator[Chunk]:
    columns = reading.columns(tables.names(source), str(source.path))
    for found in tables.rows(source, columns, start.offset):
        pieces = []
        for row, record in enumerate(found.rows, found.first):
            pieces += reading.pieces(record, f"{source.path} row {row}")
        yield Chunk(pieces, Place(found.first + len(found.rows)), found.read)


def _blocks(path: Path, offset: int, whole_lines: bool) -> Iterator[tuple[int, bytes]]:
    """Parts of a file that end with a line; if lines are very long and may be cut, with a character."""
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK):
            if not data.endswith(b"\n"):
                data += file.readline() if whole_lines else file.readline(CHUNK) + _rest_of_character(file)
            yield offset, data
            offset += len(data)


def _rest_of_character(file: BinaryIO) -> bytes:
    """Up to three bytes that complete a character."""
    rest = b""
    while len(rest) < 3 and (byte := file.read(1)):
        if byte[0] & 0xC0 != 0x80:
            file.seek(-1, 1)
            break
        rest += byte
    return rest


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise UserError(f"{path} is not UTF-8: byte {at} is 0x{data[error.start]:02x}") from None
    return text.removeprefix("\ufeff") if offset == 0 else text
