"""Appends to token files chunk by chunk, with a journal that records how much of them is valid."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.train.data.chunks import Place
from cubeloom.train.data.conversations import Conversations
from cubeloom.train.data.encoded import Encoder
from cubeloom.train.data.meta import COUNTED, DOCUMENTS, ENDS, MARKS, TOKENS, Part, token_dtype
from cubeloom.train.data.reading import Piece
from cubeloom.train.data.tokenizer import Tokenizer

VALIDATION = "validation-"
"""Prefix of the files that hold validation until the end."""
_PREFIXES = ("", VALIDATION)
_COPIED = 1 << 22
_LEAST = 64
"""The number of tokens after which a document is written in two parts."""


@dataclass(frozen=True)
class State:
    """After a chunk: where to continue reading, and how much is written."""

    source: int
    place: Place
    document: int
    open: bool
    """Whether the last document has begun and not ended."""
    training: Part
    validation: Part


BEGIN = State(source=0, place=Place(), document=0, open=False, training=Part(0, 0), validation=Part(0, 0))


class Writer:
    """Appends documents to the files of training and validation. At the end validation is appended to training's files."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        validation: Fraction,
        state: State,
        chat: Conversations | None = None,
    ) -> None:
        """`chat`: set if there are conversations, and so marks of the targets that count."""
        self.state = state
        self._encode = Encoder(tokenizer, chat, validation)
        self._marked = chat is not None
        self._dtype = token_dtype(tokenizer.vocabulary)
        self._validation = validation
        sizes = {
            prefix + name: size
            for prefix, part in zip(_PREFIXES, (state.training, state.validation), strict=True)
            for name, size in (
                (TOKENS, part.tokens * self._dtype.itemsize),
                (DOCUMENTS, part.documents * ENDS.itemsize),
                *([] if chat is None else [(COUNTED, part.tokens * MARKS.itemsize)]),
            )
        }
        with ExitStack() as opened:
            self._files = {name: opened.enter_context(_cut(folder / name, size)) for name, size in sizes.items()}
            self._opened = opened.pop_all()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, pieces: list[Piece], source: int, place: Place) -> None:
        """Add one chunk, after which reading continues at this position of this source. Empty documents are skipped."""
        pieces = [piece for piece in pieces if piece.text or piece.ends]
        *parts, document, is_open = self._encode(pieces, self.state.document, self.state.open)
        after = []
        for prefix, part, before in zip(_PREFIXES, parts, (self.state.training, self.state.validation), strict=True):
            if part.tokens:
                self._files[prefix + TOKENS].write(np.concatenate(part.tokens).astype(self._dtype).tobytes())
                self._files[prefix + DOCUMENTS].write(
                    (np.array(part.ends, ENDS) + before.tokens).astype(ENDS).tobytes()
                )
                if self._marked:
                    self._files[prefix + COUNTED].write(np.concatenate(part.counted).astype(MARKS).tobytes())
            after.append(Part(before.tokens + part.size, before.documents + len(part.ends)))
        self.state = State(
            source=source,
            place=place,
            document=document,
            open=is_open,
            training=after[0],
            validation=after[1],
        )
        self._save()

    def next_source(self) -> None:
        self.state = replace(self.state, source=self.state.source + 1, place=Place())

    def finish(self) -> None:
        """Append validation to training. Its own files stay: as long as the journal exists, this can be repeated."""
        if not self.state.validation.documents and self._validation and not self._marked:
            self._cut_last_document()
        shift = self.state.training.tokens
        for name, dtype in ((TOKENS, None), (DOCUMENTS, ENDS), *([(COUNTED, None)] if self._marked else [])):
            part = self._files[VALIDATION + name]
            part.seek(0)
            while data := part.read(_COPIED):
                shifted = data if dtype is None else (np.frombuffer(data, dtype) + np.uint64(shift)).tobytes()
                self._files[name].write(shifted)
        self._save()

    def _cut_last_document(self) -> None:
        """If there are too few documents for the share, validation gets this share of the tokens from the end."""
        total = self.state.training.tokens
        wanted = int(total * self._validation)
        cut = total - (wanted if wanted >= _LEAST else 0)
        file = self._files[DOCUMENTS]
        file.seek(0)
        ends = np.frombuffer(file.read(), ENDS)
        # An interrupted attempt may already have made this cut.
        ends = np.unique(np.append(ends, [cut, total] if cut < total else [total])).astype(ENDS)
        file.seek(0)
        file.write(ends.tobytes())
        if cut < total:
            training = int((ends <= cut).sum())
            self.state = replace(
                self.state,
                training=Part(cut, training),
                validation=Part(total - cut, len(ends) - training),
            )

    def _save(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())


def _cut(path: Path, size: int) -> BinaryIO:
    """A file to append to, truncated to the journal's last entry."""
    if (path.stat().st_size if path.exists() else 0) < size:
        raise UserError("what an interrupted run had left was damaged, and is removed now; run again")
    path.touch()
    os.truncate(path, size)
    file = path.open("r+b")
    file.seek(size)
    return file
