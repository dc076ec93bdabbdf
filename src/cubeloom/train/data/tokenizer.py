"""The interface of tokenizers, and the one that needs no package: a token for each byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


END = "<|endoftext|>"
"""The end token of our own tokenizers, as it appears in text with special tokens."""


class Tokenizer(Protocol):
    """Text to tokens and back. Tokens are 0 to `vocabulary` - 1; one of them, `end`, ends a document."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def end_text(self) -> str:
        """The text of `end` among `specials`."""
        ...

    @property
    def fingerprint(self) -> str:
        """Two tokenizers have the same fingerprint only if they give the same tokens."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """The tokens of each text, without end tokens."""
        ...

    @property
    def specials(self) -> Mapping[str, int]:
        """Special tokens, by the text that chat templates write for them."""
        ...

    def encode_special(self, text: str) -> tuple[Array, Array]:
        """The tokens of a text in which special tokens count as such, and the character position at which each ends."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """End tokens are left out."""
        ...


class Bytes:
    """UTF-8 bytes as they are, and 256 as the end token."""

    vocabulary = 257
    end = 256
    end_text = END
    fingerprint = "bytes"
    specials: Mapping[str, int] = MappingProxyType({END: 256})

    def encode(self, texts: Sequence[str]) -> list[Array]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def encode_special(self, text: str) -> tuple[Array, Array]:
        tokens, ends, done = [], [], 0
        for place, part in enumerate(text.split(END)):
            if place:
                done += len(END)
                tokens.append(np.array([self.end]))
                ends.append(np.array([done]))
            each = np.array([len(character.encode()) for character in part], np.int64)
            tokens.append(np.frombuffer(part.encode(), np.uint8))
            ends.append(np.repeat(done + 1 + np.arange(len(part)), each))
            done += len(part)
        return np.concatenate(tokens).astype(np.uint32), np.concatenate(ends).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token != self.end).decode(errors="replace")
