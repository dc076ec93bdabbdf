"""What a tokenizer is, and the one that needs no package: a token for each byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Tokenizer(Protocol):
    """Text to tokens and back. Tokens are 0 to `vocabulary` - 1; one of them, `end`, ends a document."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """The same for two tokenizers only if they give the same tokens."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """The tokens of each text, without end tokens."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """End tokens are left out."""
        ...


class Bytes:
    """UTF-8 bytes as they are, and 256 as the end."""

    vocabulary = 257
    end = 256
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Array]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token != self.end).decode(errors="replace")
