"""Token files as they grow: appended chunk by chunk, with a journal of how far they are good."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.train.data.chunks import Place
from cubeloom.train.data.conversations import Conversations
from cubeloom.train.data.meta import COUNTED, DOCUMENTS, ENDS, MARKS, TOKENS, Part, token_dtype
from cubeloom.train.data.reading import Piece
from cubeloom.train.data.tokenizer import Array, Tokenizer

VALIDATION = "validation-"
"""Before the names of files that hold validation until the end."""
_COPIED = 1 << 22


@dataclass(frozen=True)
class State:
    """After a chunk: where to read on, and how much is written."""

    source: int
    place: Place
    document: int
    open: bool
    """Whether the last document has begun and not ended."""
    training: Part
    validation: Part


BEGIN = State(source=0, place=Place(), document=0, open=False, training=Part(0, 0), validation=Part(0, 0))


class Writer:
    """Appends documents to the files of training and of validation. Validation joins training's files at the end."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        validation: Fraction,
        state: State,
        chat: Conversations | None = None,
    ) -> None:
        """`chat`: if there are conversations, and so marks of what counts."""
        self.state = state
        self._chat = chat
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocabulary)
        self._validation = validation
        sizes = {
            prefix + name: size
            for prefix, part in (("", state.training), (VALIDATION, state.validation))
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
        """One chunk, after which reading goes on at this place of this source. Empty documents are left out."""
        pieces = [piece for piece in pieces if piece.text or piece.ends]
        tokens: dict[str, list[Array]] = {"": [], VALIDATION: []}
        counted: dict[str, list[Array]] = {"": [], VALIDATION: []}
        ends: dict[str, list[int]] = {"": [], VALIDATION: []}
        counts = {"": self.state.training.tokens, VALIDATION: self.state.validation.tokens}
        document, is_open = self.state.document, self.state.open
        for piece, (found, marks) in zip(pieces, encoded(pieces, self._tokenizer, self._chat), strict=True):
            part = VALIDATION if is_validation(document, self._validation) else ""
            is_open = is_open or bool(piece.text)
            closes = piece.ends and is_open
            if closes:
                found, marks = self._closed(found, marks, piece)
            tokens[part].append(found)
            counted[part].append(marks)
            counts[part] += len(found)
            if closes:
                ends[part].append(counts[part])
                document, is_open = document + 1, False
        for part in tokens:
            if tokens[part]:
                self._files[part + TOKENS].write(np.concatenate(tokens[part]).astype(self._dtype).tobytes())
                self._files[part + DOCUMENTS].write(np.array(ends[part], dtype=ENDS).tobytes())
                if self._chat is not None:
                    self._files[part + COUNTED].write(np.concatenate(counted[part]).astype(MARKS).tobytes())
        self.state = State(
            source=source,
            place=place,
            document=document,
            open=is_open,
            training=Part(counts[""], self.state.training.documents + len(ends[""])),
            validation=Part(counts[VALIDATION], self.state.validation.documents + len(ends[VALIDATION])),
        )
        self._save()

    def _closed(self, tokens: Array, marks: Array, piece: Piece) -> tuple[Array, Array]:
        """With the token that ends the document, unless a template wrote it; after a template it is not the answer's."""
        end = self._tokenizer.end
        if piece.marked is not None and len(tokens) and tokens[-1] == end:
            return tokens, marks
        return np.append(tokens, end), np.append(marks, piece.marked is None)

    def next_source(self) -> None:
        self.state = replace(self.state, source=self.state.source + 1, place=Place())

    def finish(self) -> None:
        """Append validation to training. Its own files stay: as long as there is a journal this can be done again."""
        if self.state.document == 1 and self._validation:
            self._cut_only_document()
        shift = self.state.training.tokens
        for name, dtype in ((TOKENS, None), (DOCUMENTS, ENDS), *([] if self._chat is None else [(COUNTED, None)])):
            part = self._files[VALIDATION + name]
            part.seek(0)
            while data := part.read(_COPIED):
                shifted = data if dtype is None else (np.frombuffer(data, dtype) + np.uint64(shift)).tobytes()
                self._files[name].write(shifted)
        self._save()

    def _cut_only_document(self) -> None:
        """Of a single text file validation gets the end: so many of its tokens."""
        total = self.state.training.tokens
        cut = total - int(total * self._validation)
        # Each time at the same place, whatever an interrupted try left there.
        self._files[DOCUMENTS].seek(0)
        self._files[DOCUMENTS].write(np.array([cut, total] if cut < total else [total], ENDS).tobytes())
        if cut < total:
            self.state = replace(self.state, training=Part(cut, 1), validation=Part(total - cut, 1))

    def _save(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())


def encoded(pieces: Sequence[Piece], tokenizer: Tokenizer, chat: Conversations | None) -> Iterator[tuple[Array, Array]]:
    """The tokens of each, and which of them count: of text all."""
    texts = iter(tokenizer.encode([piece.text for piece in pieces if piece.marked is None]))
    for piece in pieces:
        if piece.marked is None:
            found = next(texts)
            yield found, np.ones(len(found), bool)
        else:
            assert chat is not None
            yield chat.encode(piece.marked, tokenizer)


def is_validation(document: int, share: Fraction) -> bool:
    """Of n documents ⌊n · share⌋, spread evenly; never the first."""
    return int((document + 1) * share) > int(document * share)


def _cut(path: Path, size: int) -> BinaryIO:
    """A file to append to, without what was written after the last entry of the journal."""
    if (path.stat().st_size if path.exists() else 0) < size:
        raise UserError("what an interrupted run had left was damaged, and is removed now; run again")
    path.touch()
    os.truncate(path, size)
    file = path.open("r+b")
    file.seek(size)
    return file
