"""Samples of documents that are read during training: in order of their numbers, with a state from which to resume."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.train.data.conversations import Conversations
from cubeloom.train.data.documents import Documents, Where
from cubeloom.train.data.encoded import Encoded, Encoder
from cubeloom.train.data.packing import Packs, with_targets
from cubeloom.train.data.stream import Stream
from cubeloom.train.data.token_file import PartName
from cubeloom.train.data.tokenizer import Array, Tokenizer


@dataclass(frozen=True)
class _State:
    """Between two chunks: where to continue reading, and what is left over from earlier chunks."""

    number: int = 0
    """The number of the next sample."""
    where: Where = field(default_factory=dict)
    document: int = 0
    open: bool = False
    tokens: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    epoch: int = 0


class Streaming:
    """`Samples` that are read forward: windows, or packs of whole documents, in document order, epoch after epoch.

    Every rank reads and tokenizes everything and takes its share, so the samples are the same on every grid.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        sequence: int,
        *,
        chat: Conversations | None = None,
        packing: bool = False,
        validation: Fraction = Fraction(0),
        part: PartName = "training",
        state: dict[str, Any] | None = None,
    ) -> None:
        """`state`: a result of the method `state`. `chat` handles conversations, of which only the answers count."""
        self.sequence = sequence
        self.tokenizer = tokenizer.fingerprint
        self.name = documents.name
        self._documents = documents
        self._end = tokenizer.end
        self._encode = Encoder(tokenizer, chat, validation)
        self._part, self._packing, self._chat = part, packing, chat is not None
        self._states = deque([self._taken(state)])
        self._lock = threading.Lock()
        self._samples = self._read(self._states[0])
        self._next = self._states[0].number

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        rows = [self._row(number) for number in numbers.tolist()]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def state(self, position: int) -> dict[str, Any]:
        """The state as JSON, from which the sample of this number and later ones can be read again."""
        self.forget(position)
        with self._lock:
            return {"sequence": self.sequence, "documents": self.name, **vars(self._states[0])}

    def forget(self, position: int) -> None:
        """Discard states before the sample of this number: nothing will resume from them."""
        with self._lock:
            while len(self._states) > 1 and self._states[1].number <= position:
                self._states.popleft()

    def _taken(self, state: dict[str, Any] | None) -> _State:
        if state is None:
            return _State()
        known = dict(state)
        was = known.pop("documents", None), known.pop("sequence", None)
        if was != (self.name, self.sequence):
            raise UserError(
                f"the run stopped in the stream {was[0]} with samples of {was[1]} tokens, and would go on with {self.name} and "
                f"samples of {self.sequence}: give it the same, or begin a new run"
            )
        found: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in known.items()}
        return _State(**found)

    def _row(self, number: int) -> dict[str, Tensor]:
        if number < self._next:
            raise ValueError(f"sample {number} of a stream has been read")
        while True:
            found = next(self._samples)
            self._next += 1
            if self._next > number:
                return found

    def _read(self, state: _State) -> Iterator[dict[str, Tensor]]:
        while True:
            empty = not state.where
            for pieces, where in self._documents.read(state.where):
                *parts, document, is_open = self._encode(
                    [piece for piece in pieces if piece.text or piece.ends], state.document, state.open
                )
                found = parts[self._part == "validation"]
                empty = empty and not found.size
                made, left = self._made(state, found)
                state = replace(left, where=where, document=document, open=is_open)
                for place in range(0 if made is None else made.windows):
                    assert made is not None
                    state = replace(state, number=state.number + 1)
                    yield {name: rows[0] for name, rows in made.batch(torch.tensor([place])).items()}
                with self._lock:
                    self._states.append(state)
            if empty:
                raise UserError(f"there is no document for {self._part} in {self.name}")
            state = replace(state, where={}, document=0, open=False, epoch=state.epoch + 1)

    def _made(self, state: _State, found: Encoded) -> tuple[Stream | None, _State]:
        """Samples from the leftover and the new tokens, and the new leftover."""
        before = len(state.tokens)
        tokens = np.concatenate([np.array(state.tokens, np.int64), *found.tokens]).astype(np.int64)
        counted = np.concatenate([np.array(state.counted, np.int64), *found.counted]).astype(np.int64)
        ends = np.array([*state.ends, *(before + end for end in found.ends)], np.int64)
        made, rest = self._cut(tokens, counted, ends)
        return made, replace(
            state,
            tokens=tuple(tokens[rest:].tolist()),
            counted=tuple(counted[rest:].tolist()),
            ends=tuple((ends[ends > rest] - rest).tolist()),
        )

    def _cut(self, tokens: Array, counted: Array, ends: Array) -> tuple[Stream | None, int]:
        """Samples of these tokens, and where the leftover begins."""
        if self._packing:
            tail = [] if len(ends) and ends[-1] == len(tokens) else [len(tokens)]
            packs = Packs.of(np.append(ends, tail).astype(np.int64), self.sequence)
            # More documents may fit into the last pack.
            starts, stops, rest = packs.starts[:-1], packs.stops[:-1], int(packs.starts[-1]) if len(packs) else 0
            found: Packs | None = Packs(starts, stops, packs.ends)
        else:
            count = max(0, len(tokens) - 1) // self.sequence
            starts = np.arange(count) * self.sequence
            stops, rest, found = starts + self.sequence + 1, count * self.sequence, None
        if not len(starts):
            return None, rest
        kept = with_targets(starts, stops, counted, None if found is None else found.ends) if self._chat else None
        if kept is not None and not len(kept):
            return None, rest
        return Stream(
            tokens,
            self.sequence,
            shuffled=False,
            counted=counted if self._chat else None,
            packs=found,
            end=self._end,
            kept=kept,
        ), rest


class ValidationStream:
    """The first samples of a stream, kept in memory: validation reads them again and again."""

    def __init__(self, stream: Streaming) -> None:
        self.sequence = stream.sequence
        self.name = stream.name
        self._stream = stream
        self._rows: list[dict[str, Tensor]] = []

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        while len(self._rows) <= int(numbers.max()):
            found = self._stream.batch(torch.tensor([len(self._rows)]))
            self._rows.append({name: rows[0] for name, rows in found.items()})
        rows = [self._rows[number] for number in numbers.tolist()]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
