"""Documents that are read during training, with a position at which reading resumes: from files, or from a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from cubeloom.base.errors import UserError, first_line
from cubeloom.train.data.chunks import Place, chunks
from cubeloom.train.data.reading import Piece, Reading
from cubeloom.train.data.sources import KINDS, Source, files_of, is_dataset

HUB = "hf:"
_RUNS_NO_SCRIPTS = 4  # the first version of datasets
_AT_ONCE = 64  # records between two positions
Where = dict[str, Any]
"""A position, as JSON; empty at the start."""


class Documents(Protocol):
    @property
    def name(self) -> str: ...

    def read(self, where: Where) -> Iterator[tuple[list[Piece], Where]]:
        """Everything from this position on, each time with the position after it."""
        ...


class Records(Protocol):
    """The interface of a streamed Hugging Face dataset, and of any similar iterable."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position of the current iteration."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """The next iteration continues there."""
        ...


class Files:
    """All text, JSON lines, Parquet and Arrow files of a folder, in order of name; or one file."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.name = str(path)
        self._reading = reading
        if not path.is_dir() or is_dataset(path):
            found = files_of(path)
        else:
            found = sorted(each for each in path.iterdir() if each.suffix.lower() in (*KINDS, ".txt"))
        self._sources = [Source(each, each.stat().st_size, "") for each in found]
        if not any(source.bytes for source in self._sources):
            raise UserError(f"{path} has no files of text: .jsonl, .parquet, .arrow or .txt")

    def read(self, where: Where) -> Iterator[tuple[list[Piece], Where]]:
        first, place = int(where.get("source", 0)), Place(int(where.get("offset", 0)), int(where.get("line", 0)))
        for number, source in enumerate(self._sources[first:], first):
            for chunk in chunks(source, place, self._reading):
                yield chunk.pieces, {"source": number, "offset": chunk.after.offset, "line": chunk.after.line}
            place = Place()


class Streamed:
    """Records of an iterable with a state. `make` creates it again for each epoch."""

    def __init__(self, name: str, make: Callable[[], Records], reading: Reading) -> None:
        self.name = name
        self._make = make
        self._reading = reading

    def read(self, where: Where) -> Iterator[tuple[list[Piece], Where]]:
        records, number = self._make(), int(where.get("record", 0))
        if where:
            records.load_state_dict(where["state"])
        pieces: list[Piece] = []
        for record in records:
            number += 1
            pieces += self._reading.pieces(record, f"{self.name} record {number}")
            if number % _AT_ONCE == 0:
                yield pieces, {"record": number, "state": records.state_dict()}
                pieces = []
        if pieces:
            yield pieces, {"record": number, "state": records.state_dict()}


def hub(name: str, subset: str | None, split: str, reading: Reading) -> Streamed:
    """A dataset of Hugging Face's hub, with the package `datasets`. Nothing is fetched before the first read."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{HUB}{name} needs the package datasets: pip install 'cubeloom[hub]'") from None

    if int(getattr(datasets, "__version__", "4").partition(".")[0]) < _RUNS_NO_SCRIPTS:
        raise UserError(f"{HUB}{name} needs datasets {_RUNS_NO_SCRIPTS} or newer, which run no script of a dataset")

    def make() -> Records:
        try:
            found: Records = datasets.load_dataset(name, subset, split=split, streaming=True)
        except Exception as error:  # from the network, the hub, or the dataset
            raise UserError(f"{HUB}{name} cannot be read: {first_line(error)}") from None
        return found

    return Streamed(f"{HUB}{name}", make, reading)
