"""Sources in chunks, each with the place where the next begins, so that reading can go on from there.

Where a chunk ends depends on the source alone: a run that was interrupted sees the same chunks as one that was not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from cubeloom.base.errors import UserError, first_line
from cubeloom.train.data.sources import Source

CHUNK = 1 << 22
ROWS = 1024


@dataclass(frozen=True)
class Place:
    """In a source: bytes, or rows of Parquet; and the lines before it, for messages."""

    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class Piece:
    """Text of one document, and whether the document ends with it."""

    text: str
    ends: bool


@dataclass(frozen=True)
class Chunk:
    pieces: list[Piece]
    after: Place
    read: int
    """Bytes of the source up to the end of this chunk; of Parquet, in proportion to rows."""


def chunks(source: Source, start: Place, field: str, separator: str | None) -> Iterator[Chunk]:
    """The rest of a source. `field` is for JSON lines and Parquet, `separator` for text."""
    if source.kind == "json lines":
        yield from _json_lines(source, start, field)
    elif source.kind == "parquet":
        yield from _parquet(source, start, field)
    else:
        yield from _text(source, start, separator)


def _text(source: Source, start: Place, separator: str | None) -> Iterator[Chunk]:
    for offset, data in _blocks(source.path, start.offset, whole_lines=separator is not None):
        end = offset + len(data)
        pieces = _cut(_decode(data, source.path, offset), separator, last=end == source.bytes)
        yield Chunk(pieces, Place(end), end)


def _cut(text: str, separator: str | None, last: bool) -> list[Piece]:
    """A line that is exactly the separator ends a document, and so does the end of the file."""
    if separator is None:
        return [Piece(text, last)]
    end_of_line = r"\r?(?:\n|\Z)" if last else r"\r?\n"
    *whole, rest = re.split(f"^{re.escape(separator)}{end_of_line}", text, flags=re.MULTILINE)
    return [*(Piece(part, True) for part in whole), Piece(rest, last)]


def _json_lines(source: Source, start: Place, field: str) -> Iterator[Chunk]:
    line = start.line
    for offset, data in _blocks(source.path, start.offset, whole_lines=True):
        pieces = []
        # A line ends in a newline and nothing else: text may hold other separators of lines, such as U+2028.
        lines = _decode(data, source.path, offset).removesuffix("\n").split("\n")
        for number, text in enumerate(lines, line + 1):
            if text.strip():
                pieces.append(Piece(_member(text, field, f"{source.path} line {number}"), True))
        line += len(lines)
        end = offset + len(data)
        yield Chunk(pieces, Place(end, line), end)


def _member(text: str, field: str, where: str) -> str:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object with a field {field!r}")
    if field not in record:
        raise UserError(_unknown(field, list(record), where))
    return _string(record[field], field, where)


def _string(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} is not text but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON may spell half of a surrogate pair
        raise UserError(f"{where}: field {field!r} holds half of a character, which UTF-8 cannot") from None
    return value


def _parquet(source: Source, start: Place, field: str) -> Iterator[Chunk]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{source.path} needs the package pyarrow: pip install 'cubeloom[parquet]'") from None
    row = 0
    try:
        with parquet.ParquetFile(source.path) as file:
            if field not in file.schema_arrow.names:
                raise UserError(_unknown(field, file.schema_arrow.names, str(source.path)))
            for group in range(file.num_row_groups):
                if row + file.metadata.row_group(group).num_rows <= start.offset:
                    row += file.metadata.row_group(group).num_rows
                    continue
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=[field]):
                    first, row = row, row + batch.num_rows
                    if first < start.offset:
                        continue
                    values = enumerate(batch.column(0).to_pylist(), first)
                    pieces = [Piece(_string(value, field, f"{source.path} row {at}"), True) for at, value in values]
                    yield Chunk(pieces, Place(row), source.bytes * row // file.metadata.num_rows)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's, and not the file's
        raise UserError(f"{source.path} is not a readable Parquet file: {first_line(error)}") from None


def _unknown(field: str, fields: list[str], where: str) -> str:
    near = get_close_matches(field, fields, 1)
    hint = f"; did you mean --field {near[0]}?" if near else ""
    return f"{where} has no field {field!r}, but {', '.join(map(repr, fields)) or 'none'}{hint}"


def _blocks(path: Path, offset: int, whole_lines: bool) -> Iterator[tuple[int, bytes]]:
    """Parts of a file that end with a line; where lines are very long and need not be whole, with a character."""
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK):
            if not data.endswith(b"\n"):
                data += file.readline() if whole_lines else file.readline(CHUNK) + _rest_of_character(file)
            yield offset, data
            offset += len(data)


def _rest_of_character(file: BinaryIO) -> bytes:
    """Up to three bytes that go on with a character."""
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
