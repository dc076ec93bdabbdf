"""Rows of Parquet and Arrow files, one batch at a time. Arrow as Hugging Face's `save_to_disk` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cubeloom.base.errors import UserError, first_line
from cubeloom.train.data.sources import Source

ROWS = 1024


@dataclass(frozen=True)
class Rows:
    """Rows from `first` on, each a dict of the requested columns."""

    first: int
    rows: list[dict[str, Any]]
    read: int
    """Bytes of the source up to the end of these rows."""


def names(source: Source) -> list[str]:
    """The names of its columns."""
    with _readable(source):
        if source.kind == "arrow":
            with _memory(source) as memory:
                return list(_opened(memory).schema.names)
        from pyarrow import parquet

        with parquet.ParquetFile(source.path) as file:
            return list(file.schema_arrow.names)


def rows(source: Source, columns: list[str], start: int) -> Iterator[Rows]:
    """From this row on, which must be the first of a batch."""
    with _readable(source):
        yield from (_arrow if source.kind == "arrow" else _parquet)(source, columns, start)


def _parquet(source: Source, columns: list[str], start: int) -> Iterator[Rows]:
    from pyarrow import parquet

    row = 0
    with parquet.ParquetFile(source.path) as file:
        for group in range(file.num_row_groups):
            if row + file.metadata.row_group(group).num_rows <= start:
                row += file.metadata.row_group(group).num_rows
                continue
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns):
                first, row = row, row + batch.num_rows
                if first >= start:
                    yield Rows(first, batch.to_pylist(), source.bytes * row // file.metadata.num_rows)


def _arrow(source: Source, columns: list[str], start: int) -> Iterator[Rows]:
    row = 0
    with _memory(source) as memory:
        for batch in _batches(_opened(memory)):
            for begin in range(0, batch.num_rows, ROWS):
                part = batch.slice(begin, ROWS)
                first, row = row, row + part.num_rows
                if first >= start:
                    yield Rows(first, part.select(columns).to_pylist(), min(memory.tell(), source.bytes))


def _batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def _memory(source: Source) -> Any:
    import pyarrow

    return pyarrow.memory_map(str(source.path))


def _opened(memory: Any) -> Any:
    """Hugging Face writes Arrow's stream format; others may write its file format, which begins with a magic word."""
    from pyarrow import ipc

    is_file = memory.read(6) == b"ARROW1"
    memory.seek(0)
    return (ipc.open_file if is_file else ipc.open_stream)(memory)


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{source.path} needs the package pyarrow: pip install 'cubeloom[parquet]'") from None
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the file's contents
        kind = "Arrow" if source.kind == "arrow" else "Parquet"
        raise UserError(f"{source.path} is not a readable {kind} file: {first_line(error)}") from None
