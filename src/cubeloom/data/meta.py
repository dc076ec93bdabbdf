"""What `meta.json` says of a folder of tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cubeloom.errors import UserError
from cubeloom.files import replace_text

FORMAT, VERSION = "cubeloom tokens", 1
META, TOKENS, DOCUMENTS, TOKENIZER = "meta.json", "tokens.bin", "documents.bin", "tokenizer.json"
ENDS = np.dtype("<u8")
"""Of the ends of documents."""


@dataclass(frozen=True)
class Part:
    """Training or validation: whole documents, each with its end token."""

    tokens: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Training comes first in the files, validation after it. Everything but `request` can be checked in the files."""

    vocabulary: int
    end: int
    dtype: str
    training: Part
    validation: Part
    tokenizer: str
    """The fingerprint of the tokenizer."""
    sha256: dict[str, str]
    """Of each file beside this one."""
    request: dict[str, Any]
    """What was asked for: the sources with their hashes, and the options. The same request gives the same folder."""

    @property
    def tokens(self) -> int:
        return self.training.tokens + self.validation.tokens

    @property
    def documents(self) -> int:
        return self.training.documents + self.validation.documents

    def write(self, folder: Path) -> None:
        known = {"format": FORMAT, "version": VERSION, **asdict(self)}
        replace_text(folder / META, json.dumps(known, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Meta:
        try:
            known = json.loads((folder / META).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{folder} is not a folder of tokens: {META} cannot be read ({error.strerror})") from None
        except ValueError:
            raise UserError(f"{folder / META} is damaged: it is not JSON") from None
        if not isinstance(known, dict) or known.pop("format", None) != FORMAT:
            raise UserError(f"{folder} is not a folder of tokens: {META} is of another program")
        if (version := known.pop("version", None)) != VERSION:
            raise UserError(f"{folder} is of version {version} of the format; this program reads version {VERSION}")
        try:
            training, validation = Part(**known.pop("training")), Part(**known.pop("validation"))
            return cls(training=training, validation=validation, **known)
        except (KeyError, TypeError):
            raise UserError(f"{folder / META} is damaged: it lacks something, or has too much") from None


def token_dtype(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
