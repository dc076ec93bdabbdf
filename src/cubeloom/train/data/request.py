"""What is asked of `prepare`, checked, and as the JSON by which two requests are the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.limits import SIZE, within
from cubeloom.train.data import hugging_face
from cubeloom.train.data.sources import Source

DEFAULT_VOCABULARY = 16384


@dataclass(frozen=True, kw_only=True)
class Request:
    inputs: tuple[Path, ...]
    tokenizer: str = "bytes"
    """`bytes`, `bpe`, or the path of a tokenizer file."""
    vocabulary: int | None = None
    """Of bpe; it has fewer where the text does not hold as many."""
    end: str | None = None
    """The token of a tokenizer file that ends a document."""
    field: str = "text"
    """Of JSON lines and Parquet."""
    separator: str | None = None
    """In text, a line that ends a document; else a file is a document."""
    validation: float = 0.01
    """Share of documents."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise UserError(f"--validation must be at least 0 and below 1, got {self.validation}")
        if self.separator is not None and "\n" in self.separator:
            raise UserError("--separator is one line")
        if self.vocabulary is not None and self.tokenizer != "bpe":
            raise UserError(f"--vocab is for --tokenizer bpe; that of {self.tokenizer} is fixed")
        if self.end is not None and self.tokenizer in ("bytes", "bpe"):
            raise UserError(f"--end is for a tokenizer file; that of {self.tokenizer} is fixed")
        if self.vocabulary is not None:  # 256 bytes and the end are in all of them
            within("--vocab", self.vocabulary, hugging_face.SMALLEST, SIZE)
        if self.tokenizer != "bytes":
            hugging_face.require()

    @property
    def share(self) -> Fraction:
        """The share of validation as it is written: 0.1 is a tenth."""
        return Fraction(str(self.validation))

    def as_json(self, sources: list[Source]) -> dict[str, Any]:
        return {
            "tokenizer": self._tokenizer(),
            "field": self.field,
            "separator": self.separator,
            "validation": str(self.share),
            "sources": [source.as_json() for source in sources],
        }

    def _tokenizer(self) -> dict[str, Any]:
        if self.tokenizer == "bytes":
            return {"kind": "bytes"}
        if self.tokenizer == "bpe":
            return {"kind": "bpe", "vocabulary": self.vocabulary or DEFAULT_VOCABULARY}
        text = hugging_face.read(Path(self.tokenizer))
        return {"kind": "file", "sha256": hashlib.sha256(text.encode()).hexdigest(), "end": self.end}
