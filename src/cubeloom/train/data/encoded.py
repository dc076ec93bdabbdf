"""Turns pieces of documents into tokens, by part, with the targets that count and the ends of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from cubeloom.train.data.conversations import Conversations
from cubeloom.train.data.reading import Piece
from cubeloom.train.data.tokenizer import Array, Tokenizer


@dataclass
class Encoded:
    """What one part gets from some pieces."""

    tokens: list[Array] = field(default_factory=list)
    counted: list[Array] = field(default_factory=list)
    """For each token whether it counts."""
    ends: list[int] = field(default_factory=list)
    """Ends of documents, counted from the first of these tokens."""
    size: int = 0

    def add(self, tokens: Array, counted: Array, closes: bool) -> None:
        self.tokens.append(tokens)
        self.counted.append(counted)
        self.size += len(tokens)
        if closes:
            self.ends.append(self.size)


@dataclass(frozen=True)
class Encoder:
    tokenizer: Tokenizer
    chat: Conversations | None = None
    validation: Fraction = Fraction(0)
    """Share of documents."""

    def __call__(self, pieces: Sequence[Piece], document: int, is_open: bool) -> tuple[Encoded, Encoded, int, bool]:
        """For training and for validation; and the number of the next document, and whether it has begun."""
        parts = Encoded(), Encoded()
        for piece, (tokens, counted) in zip(pieces, self._encoded(pieces), strict=True):
            part = parts[is_validation(document, self.validation)]
            is_open = is_open or bool(piece.text)
            closes = piece.ends and is_open
            part.add(*(self._closed(tokens, counted, piece) if closes else (tokens, counted)), closes)
            if closes:
                document, is_open = document + 1, False
        return *parts, document, is_open

    def _encoded(self, pieces: Sequence[Piece]) -> Iterator[tuple[Array, Array]]:
        """The tokens of each piece, and which of them count: for text all."""
        texts = iter(self.tokenizer.encode([piece.text for piece in pieces if piece.marked is None]))
        for piece in pieces:
            if piece.marked is None:
                found = next(texts)
                yield found, np.ones(len(found), bool)
            else:
                assert self.chat is not None
                yield self.chat.encode(piece.marked, self.tokenizer)

    def _closed(self, tokens: Array, counted: Array, piece: Piece) -> tuple[Array, Array]:
        """Adds the token that ends the document, unless a template wrote it. After a template it is not part of an
        answer.
        """
        end = self.tokenizer.end
        if piece.marked is not None and len(tokens) and tokens[-1] == end:
            return tokens, counted
        return np.append(tokens, end), np.append(counted, piece.marked is None)


def is_validation(document: int, share: Fraction) -> bool:
    """⌊n · share⌋ of n documents, spread evenly; never the first."""
    return int((document + 1) * share) > int(document * share)
